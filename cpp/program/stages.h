// Programs bound to their devices: stages compiled once, places of what crosses, and the memory of
// layers whose KV pages are spread: room for pages that visit, and for the CPU's part.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "cpu/key_bias.h"
#include "kv/paging.h"
#include "program/buffers.h"
#include "program/ring.h"
#include "program/visits.h"

namespace helm {

// A task and what it needs to be enqueued.
struct Bound {
  // In which tasks are enqueued; rings have events of their own.
  enum Queue : uint8_t { kHost, kMain, kAside };

  Task task;
  std::array<Stage*, 2> stages{};  // of a run; by buffer that a far page visits
  Ring::Buffer* buffer = nullptr;  // of weights that a run reads
  std::byte* host = nullptr;       // of a copy; null: the flight's memory from `offset` on
  int64_t offset = 0;
  int64_t width = 0;     // elements of a row
  Queue waits = kHost;   // for the task of that queue that was the last to record
  bool records = false;  // that it is done
};

struct BoundProgram {
  Program program;
  std::vector<Bound> tasks;
  SubBatch batch = kFirstBatch;
  std::vector<bool> visiting;  // KV entries
  int64_t staging_bytes = 0;   // of a flight: logits of a device, then what crosses to a stage
  bool brings = false;         // weights to a device
  bool late = false;           // a task of a device follows one of the CPU that waits for it
};

class Stages {
 public:
  // By device: buffers, accounts. Null where no layers visit, where no pages are far. Everything
  // must outlive the stages.
  Stages(const Plan& plan, const Weights& weights, std::span<const DeviceBuffers> buffers,
         std::span<Account* const> accounts, Visits* visits, const Paging* paging);

  // Of the second sub-batch it has the values, and its logits cross behind those of the first.
  BoundProgram bind(Program program, SubBatch batch = kFirstBatch);
  // Bytes of its flight's memory that cross to stages of a step of so many tokens, all with logits.
  int64_t crossing_bytes(const BoundProgram& program, int64_t tokens) const;

  Ring& far_pages() { return far_pages_; }
  int64_t device_bytes() const { return far_pages_.bytes(); }
  int64_t staging_bytes() const {
    return queries_[0].bytes() + partials_[0].bytes() + queries_[1].bytes() + partials_[1].bytes();
  }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  bool visits(const Task& task) const;
  int64_t place_copies(std::span<Bound> tasks, int64_t begin, const Limits& limits) const;
  void bind_run(Bound& bound, BoundProgram& made);
  void bind_copy(Bound& bound, SubBatch batch);
  Stage* stage(const Task& task, size_t buffer, SubBatch batch);
  StageSpec spec(const Task& task, size_t buffer, SubBatch batch);
  StageSpec spec_of_far_on_cpu(const Task& task, SubBatch batch);
  std::byte* bias_of(const Task& task, const cpu::KeyBias& bias);
  std::vector<Op> ops(const Task& task) const;
  ValueIndex far_value() const { return static_cast<ValueIndex>(plan_.values.size() - 1); }

  const Plan& plan_;
  const Weights& weights_;
  std::span<const DeviceBuffers> buffers_;
  std::span<Account* const> accounts_;
  Visits* visits_;
  const Paging* paging_;
  const std::vector<bool> lacking_;  // by unit
  Ring far_pages_;
  // Where the CPU attends, [sequences, width].
  std::array<StagingMemory, 2> queries_, partials_;  // by sub-batch
  StagingMemory workspace_;
  std::byte* next_bias_ = nullptr;            // in the workspace
  std::map<TensorIndex, std::byte*> biases_;  // there
  std::deque<UnitSpec> parts_;                // of layers; stages refer to them
  using Key = std::tuple<Task::Verb, DeviceIndex, size_t, size_t, size_t, SubBatch>;
  std::map<Key, std::unique_ptr<Stage>> stages_;
};

}  // namespace helm
