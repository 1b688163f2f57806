// KV pages of accelerator layers that do not fit there: the oldest full blocks are copied to host
// memory beside the computing, and attention merges what lies there with what lies on the
// accelerator. Either the pages visit the accelerator, one ahead of the one being attended to, or
// the CPU attends to them where they lie while the accelerator attends to its own.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "device/memory.h"
#include "helm/plan.h"
#include "kv/cache.h"

namespace helm {

// The step's blocks that lie in host memory.
struct FarRuns {
  std::vector<int64_t> blocks;  // by run: so many from the first
  std::vector<int32_t> pages;   // [runs][blocks, layers]

  bool any() const { return !pages.empty(); }
};

class KvOverflow {
 public:
  // `plan` has the values of the partials (with_partials); `bound` is what stages on the
  // accelerator are bound to. Everything must outlive the overflow.
  KvOverflow(const Plan& plan, KvCache& kv, const StageSpec& bound, Account& cpu,
             Account& accelerator);

  // `plan` with a value for either partial result of attention, and which values those are: of near
  // pages, of far pages.
  static Plan with_partials(const Plan& plan);
  static std::vector<ValueIndex> partials(const Plan& plan) {
    const auto last = static_cast<ValueIndex>(plan.values.size() - 1);
    return {last - 1, last};
  }

  std::byte* far_slot(int32_t slot) const { return far_.data() + slot * slot_bytes_; }
  int64_t evicted_blocks() const { return evicted_blocks_; }
  int64_t cpu_attentions() const { return cpu_attentions_; }
  int64_t page_visits() const { return page_visits_; }
  int64_t accelerator_bytes() const { return page_memory_.bytes(); }
  // In host memory: KV pages, what crosses, the scratch of attention there.
  int64_t far_bytes() const { return far_.bytes(); }
  int64_t staging_bytes() const { return query_.bytes() + partial_.bytes(); }
  int64_t workspace_bytes() const { return cpu_workspace_.bytes(); }

  // Before a step that takes `blocks` new ones: makes room for them, and evicts what lies past the
  // watermark. All work that reads or writes pages must have been enqueued on `stream`.
  void make_room(int64_t blocks, Stream& stream);
  void synchronize() { copies_->synchronize(); }
  // Likewise: brings a block back that is about to be written to. Where both memories are full, it
  // and the block that has been full for longest change places.
  void recall(int32_t block, Stream& stream);

  // Enqueues units [begin, end), which are resident on the accelerator, for a step with far blocks.
  // step: with the page tables of all blocks, in which far ones have no entries.
  void run(size_t begin, size_t end, const StepView& step, const FarRuns& far, Stream& stream);

 private:
  // A unit in pieces; only `before` for one without attention.
  struct Unit {
    AttentionOp attention{};
    std::unique_ptr<Stage> before;                   // and the new keys and values appended
    std::unique_ptr<Stage> near;                     // attention to the accelerator's pages
    std::array<std::unique_ptr<Stage>, 2> visiting;  // to a page that visits, by its place
    std::unique_ptr<Stage> on_cpu;                   // to pages in host memory
    std::unique_ptr<Stage> after;                    // the partials merged, and the rest
  };
  struct Visitor {
    DeviceAddress page = DeviceAddress::kNull;
    std::unique_ptr<Event> loaded;
    std::unique_ptr<Event> read;
  };
  struct Leaving {
    int32_t slot;
    std::unique_ptr<Event> copied;
  };

  void compile(const StageSpec& bound);
  void compile_on_cpu(Account& account, const StageSpec& bound);
  void evict_one();
  void reclaim_one();
  void exchange(int32_t block, Stream& stream);
  void attend_on_cpu(const Unit& unit, const StepView& near, const StepView& far, Stream& stream);
  void attend_visiting(const Unit& unit, const StepView& whole, const FarRuns& far, Stream& stream);

  const Plan& plan_;
  KvCache& kv_;
  Device& device_;
  DeviceAddress near_;        // page 0 of the accelerator's pool
  int64_t slot_bytes_;        // one block of all layers there
  int64_t evict_above_;       // slots in use
  StagingMemory far_;         // [slots, layers there] pages
  StagingMemory query_;       // rows of the value that holds queries, for the CPU
  StagingMemory partial_;     // what it returns
  DeviceMemory page_memory_;  // two pages that visit
  std::vector<UnitSpec> specs_;
  std::vector<Unit> units_;  // by unit of the plan
  std::array<Visitor, 2> visitors_;
  size_t turn_ = 0;
  int64_t evicted_blocks_ = 0;
  int64_t cpu_attentions_ = 0;
  int64_t page_visits_ = 0;
  std::deque<Leaving> leaving_;  // slots whose content is being copied, oldest first
  std::vector<std::unique_ptr<Event>> spare_;
  std::unique_ptr<Event> written_;  // by the stream
  std::unique_ptr<Event> recalled_;
  std::unique_ptr<Event> query_ready_, query_here_;
  StagingMemory cpu_workspace_;
  std::vector<DeviceAddress> values_;   // of the accelerator, by ValueIndex
  std::vector<int32_t> visitor_table_;  // of a page that visits: number 0 in every layer
  std::vector<SequenceRun> runs_;       // of near pages, then one for each page that visits
  std::vector<SequenceRun> far_runs_;   // of far pages, where they lie
  std::unique_ptr<Stream> cpu_stream_;
  std::unique_ptr<Stream> copies_;
};

}  // namespace helm
