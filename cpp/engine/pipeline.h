// A plan's stages on their devices, and the steps that are on their way through them. While one
// step is at the accelerator the CPU works on the next. Knows nothing of sequences.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/memory.h"
#include "engine/block_visits.h"
#include "engine/kv_overflow.h"
#include "helm/plan.h"
#include "plan/stages.h"
#include "weights/store.h"

namespace helm {

// Everything that the stages of one device are bound to, besides weights.
class DeviceBuffers {
 public:
  DeviceBuffers() = default;
  // For units that `chosen` names, in stages of `device_stages`; with `more` values.
  DeviceBuffers(const Plan& plan, const std::vector<bool>& chosen, std::span<const ValueIndex> more,
                std::span<const StageSpan> device_stages, int64_t kv_pages, Account& account);

  // What a stage is bound to, but for its units and weights.
  StageSpec spec(const Plan& plan) const;

  DeviceAddress value(ValueIndex index) const { return values_[static_cast<size_t>(index)]; }
  DeviceAddress kv() const { return kv_.address(); }
  DeviceAddress workspace() const { return workspace_.address(); }
  int64_t kv_bytes() const { return kv_.bytes(); }
  int64_t activations_bytes() const { return activations_.bytes(); }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  DeviceMemory kv_;
  DeviceMemory activations_;
  DeviceMemory workspace_;
  std::vector<DeviceAddress> values_;  // by ValueIndex; kNull where the device does not use it
};

// One step's rows, kept until its last stage has run.
struct StepRows {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> output_rows;
  std::vector<SequenceRun> runs;
  std::vector<int32_t> pages;  // of the runs, [blocks, layers] each
  FarRuns far;
  uint64_t number = 0;  // of the step

  void reserve(const Limits& limits);
  void clear();
  StepView view() const { return {token_ids, positions, output_rows, runs, runs, number}; }
};

class Pipeline {
 public:
  // `accelerator` is null for a plan without one. Everything must outlive the pipeline.
  Pipeline(const Plan& plan, const Weights& weights, KvCache& kv, Account& cpu,
           Account* accelerator);
  ~Pipeline();

  // How many steps may be on their way at once.
  int64_t limit() const {
    return static_cast<int64_t>(accelerator_ == nullptr ? 1 : slots_.size());
  }
  int64_t in_flight() const { return in_flight_; }

  // Before the next step's pages are looked up: brings those back to the accelerator that it will
  // write to, and makes room there for `blocks` more.
  void make_room(int64_t blocks, std::span<const int32_t> recalled = {});
  // The content of a block, [layers] pages. Both wait for all steps.
  void read_block(const KvBlock& block, std::byte* to);
  void write_block(const KvBlock& block, const std::byte* from);
  // Rows to be filled for the next step, empty. Needs in_flight() < limit().
  StepRows& rows() { return slots_[next_].rows; }
  // Sends them on their way: up to the first result that must be awaited.
  void submit();
  // Finishes the oldest step. Its logits, [outputs, vocab_size], are valid until the next call of
  // any member. Throws what a device failed with; then no step can be submitted any more.
  std::span<const float> collect();
  // Runs every step to its end, so that pages may change hands; logits, or what a device failed
  // with, wait to be collected.
  void finish();

  const DeviceBuffers& buffers(bool accelerator) const { return buffers_[accelerator]; }
  int64_t staging_bytes() const;  // in host memory, for copies
  // In host memory: for KV pages of the accelerator's layers, and to attend to those.
  int64_t far_bytes() const { return overflow_ ? overflow_->far_bytes() : 0; }
  int64_t far_workspace_bytes() const { return overflow_ ? overflow_->workspace_bytes() : 0; }
  int64_t visiting_bytes() const {  // on the accelerator, for copies
    return (blocks_ ? blocks_->bytes() : 0) + (overflow_ ? overflow_->accelerator_bytes() : 0);
  }
  int64_t visiting_steps() const { return visiting_steps_; }
  // In host memory: what visits the accelerator and could not be page-locked.
  int64_t pageable_bytes() const { return blocks_ ? blocks_->pageable_bytes() : 0; }
  const KvOverflow* overflow() const { return overflow_.get(); }  // null where all KV pages fit
  int64_t crossings() const;  // between devices, per decode step

 private:
  // Units [begin, end) of a stage: those that are resident are compiled together, one that visits
  // stands alone and has no stage here.
  struct Part {
    std::unique_ptr<Stage> stage;
    size_t begin = 0;
    size_t end = 0;
  };
  struct Compiled {
    StageSpan span;
    std::vector<Part> parts;
  };
  using Program = std::vector<Compiled>;
  struct Slot {
    StepRows rows;
    const Program* program = nullptr;
    size_t next_stage = 0;
    bool awaited = false;         // a stage of the accelerator has not been waited for
    StagingMemory values;         // what crosses between devices
    StagingMemory logits;         // [step_outputs, vocab_size] from the accelerator
    std::vector<float> kept;      // logits of the CPU, when finish() ran ahead
    std::unique_ptr<Event> done;  // the accelerator's part up to `next_stage`

    bool ended() const { return !awaited && next_stage == program->size(); }
  };

  Program compile(const std::vector<bool>& on_accelerator, const Weights& weights, Account& cpu,
                  Account* accelerator);
  void create_slots(Account& cpu);
  void check_devices() const;  // throws if one has failed
  const Program& program_for(const StepView& step) const;
  void advance(Slot& slot);
  void run_to_end(Slot& slot);
  void keep_logits(Slot& slot);
  void run_on_accelerator(const Compiled& stage, Slot& slot);
  int64_t bytes_of(ValueIndex value, const Slot& slot) const;
  Slot& oldest() {
    return slots_[(next_ + slots_.size() - static_cast<size_t>(in_flight_)) % slots_.size()];
  }

  static Plan extended(const Plan& plan, const KvCache& kv);
  template <typename Move>
  void each_page(const KvBlock& block, const Move& move);
  void settle_copies();

  const Plan plan_;  // with the values that overflowing attention needs
  const KvCache& kv_;
  Device* accelerator_;
  std::array<DeviceBuffers, 2> buffers_;  // CPU, accelerator
  Program resident_;                      // every unit where it lies
  Program visiting_;                      // every block on the accelerator; empty if not planned
  std::unique_ptr<BlockVisits> blocks_;
  std::unique_ptr<KvOverflow> overflow_;  // null where all KV pages fit
  std::unique_ptr<Stream> cpu_stream_;
  std::array<Slot, 2> slots_;
  size_t next_ = 0;  // slot of the next step
  int64_t in_flight_ = 0;
  int64_t visiting_steps_ = 0;
  std::string failure_;
  std::unique_ptr<Stream> stream_;  // of the accelerator; destroyed first, it waits for its work
};

}  // namespace helm
