// Layers that lie in host memory and are run by the accelerator: their weights go up one layer
// after the other into two buffers in turn, the KV pages that a layer needs go with them, and what
// it has added comes back. Worth it for steps of many tokens.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "device/memory.h"
#include "device/pinned_memory.h"
#include "helm/plan.h"
#include "weights/store.h"

namespace helm {

class BlockVisits {
 public:
  // The buffers of `bound` (values, workspace) are those of the accelerator; kv: the pages in host
  // memory. Everything must outlive the visits, which page-lock what they copy.
  BlockVisits(const Plan& plan, const Weights& weights, const StageSpec& bound,
              std::span<std::byte> kv, Account& accelerator);

  int64_t bytes() const { return weights_memory_.bytes() + kv_memory_.bytes(); }
  // Of the weights and pages in host memory, those that could not be page-locked.
  int64_t pageable_bytes() const { return pinned_.refused_bytes(); }

  // Whether the pages here hold those of the step's sequences.
  bool holds(const StepView& step) const;
  // Starts a step: its first layer goes up. Returns the step as stages on the accelerator see it,
  // valid until the next call: layers that visit find their pages here.
  StepView begin(const StepView& step);
  // Enqueues the layer that begins with `unit` on `stream`, in the order of the plan, and the
  // weights of the one after it.
  void run(size_t unit, const StepView& view, Stream& stream);

 private:
  struct Block {
    Placed tensors;     // within a buffer
    int64_t layer = 0;  // of its KV
    size_t buffer = 0;  // 0 or 1
    size_t next = 0;    // unit that visits after this one; 0 for the last
    std::unique_ptr<Stage> stage;
  };
  struct Buffer {
    DeviceAddress address = DeviceAddress::kNull;
    std::unique_ptr<Event> loaded;
    std::unique_ptr<Event> read;  // by the stage that used it last
  };
  // A sequence's pages in host memory and here.
  struct Pages {
    const int32_t* host;  // [blocks, layers]
    int32_t first;        // page here of block 0
    int64_t existing;     // blocks with positions from before the step
    int64_t begin, end;   // blocks that the step writes to
  };

  void load(size_t unit);
  int64_t bytes_of(TensorIndex tensor) const { return plan_.bytes(*plan_.slice(tensor, kCpu)); }
  int64_t blocks_for(int64_t positions) const {
    return (positions + plan_.kv.page_tokens - 1) / plan_.kv.page_tokens;
  }

  const Plan& plan_;
  const Weights& weights_;
  std::span<std::byte> host_kv_;
  DeviceMemory weights_memory_;
  DeviceMemory kv_memory_;
  std::vector<Block> blocks_;  // by the first unit of a layer that visits; else without a stage
  size_t first_ = 0;           // unit that visits first
  std::array<Buffer, 2> buffers_;
  std::vector<Pages> pages_;    // of the step
  std::vector<int32_t> table_;  // [runs][blocks, layers]
  std::vector<SequenceRun> runs_;
  std::vector<bool> visiting_layers_;
  Device& device_;
  PinnedMemory pinned_;
  std::unique_ptr<Stream> copies_;
};

}  // namespace helm
