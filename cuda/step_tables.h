// The tables that a stage's kernels read in a step: packed on the host and uploaded in one copy.
// Knows nothing of ops beside which layers and rope tables the stage uses.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <span>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels/kernels.h"
#include "helm/plan.h"

namespace helm::cuda {

// Offsets of the tables in bytes, the same in every step, so that captured launches stay valid:
//   token_ids, positions, row_runs  [step_tokens] int32
//   output_rows                     [step_outputs] int32
//   runs                            [min(sequences, step_tokens)] Run
//   the inverse frequencies of every rope table of the plan, f32
//   pages                           [min(sequences, step_tokens)][blocks, layers of the stage]
//   int32, those blocks of each run that have pages
// each rounded up to 16 bytes. A stage also holds kStagingBlocks times as much page-locked host
// memory.
struct StepLayout {
  StepLayout(const Plan& plan, std::span<const UnitSpec> units);

  int64_t token_ids, positions, row_runs, output_rows, runs, pages;
  std::vector<int64_t> rope;    // by rope table of the plan
  std::vector<int64_t> layers;  // the plan's index of each KV layer of the stage
  int64_t bytes;                // in all

  int64_t layer_index(int64_t plan_layer) const;  // the inverse of `layers`

 private:
  template <class AnyOp>
  void use_layer(const AnyOp& op);
};

// Uploads steps to one place in the GPU's memory. The host waits only when it is kStagingBlocks
// steps ahead of the copies.
class StepUpload {
 public:
  StepUpload(const Plan& plan, std::span<const UnitSpec> units, int ordinal, void* device_memory);
  ~StepUpload();  // waits for the copies

  void enqueue(const StepView& step, cudaStream_t stream);

  const StepLayout& layout() const { return layout_; }
  StepTables tables() const;                              // in the GPU's memory
  const float* inverse_frequencies(int32_t table) const;  // likewise

 private:
  static constexpr int kStagingBlocks = 4;
  struct StagingBlock {
    StagingBlock(int64_t bytes, int ordinal)
        : memory(bytes, "the tables of a step"), uploaded(ordinal) {}
    PinnedMemory memory;
    CudaEvent uploaded;
  };

  template <class T>
  const T* on_device(int64_t offset) const {
    return reinterpret_cast<const T*>(device_ + offset);
  }
  int64_t pack(const StepView& step, std::byte* to) const;  // returns the bytes in use

  const Plan& plan_;
  StepLayout layout_;
  std::byte* device_;
  std::vector<std::unique_ptr<StagingBlock>> blocks_;
  size_t next_ = 0;
};

}  // namespace helm::cuda
