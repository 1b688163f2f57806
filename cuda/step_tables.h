// The tables that kernels read in a step: packed on the host and uploaded in one copy. Knows
// nothing of ops.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <span>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels/kernels.h"
#include "helm/plan.h"
#include "plan/cuda_scratch.h"

namespace helm::cuda {

// Offsets of the tables in bytes, the same in every step, so that captured launches stay valid:
//   token_ids, positions, row_runs  [step_tokens] int32
//   output_rows                     [step_outputs] int32
//   runs                            [most_runs] Run, most_runs = min(sequences, step_tokens)
//   the inverse frequencies of every rope table of the plan, f32
//   pages                           [most_runs][blocks, layers] int32, those blocks of each run
//   that
//                                   have pages, and [layers] of a page that visits
//   more runs, behind the pages     [most_runs * blocks] Run, each of one visiting page
// each rounded up to kTableAlignment. There is kStagingBlocks times as much page-locked host
// memory.
struct StepLayout {
  explicit StepLayout(const Plan& plan);

  int64_t token_ids, positions, row_runs, output_rows, runs, pages;
  std::vector<int64_t> rope;  // by rope table of the plan
  int64_t most_runs;
  int64_t bytes;  // in all, step_table_bytes(plan)
};

// Uploads steps to one place in the GPU's memory, for all stages that have their tables there. The
// host waits only when it is kStagingBlocks steps ahead of the copies.
class StepUpload {
 public:
  StepUpload(const Plan& plan, int ordinal, void* device_memory);
  ~StepUpload();  // waits for the copies

  // Unless the tables of this step are the last that were enqueued.
  void enqueue(const StepView& step, cudaStream_t stream);

  const Plan& plan() const { return plan_; }
  const StepLayout& layout() const { return layout_; }
  // In the GPU's memory, with the runs from `first_run` on of those that were enqueued last.
  StepTables tables(int64_t first_run) const;
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
  // Where a run lies in the tables.
  int64_t run_offset(int64_t run) const;
  int64_t pack(const StepView& step, std::byte* to);  // returns the bytes in use

  const Plan& plan_;
  StepLayout layout_;
  std::byte* device_;
  std::vector<std::unique_ptr<StagingBlock>> blocks_;
  size_t next_ = 0;
  uint64_t number_ = 0;      // of the step that was enqueued last
  int64_t more_runs_ = 0;    // offset in it
  std::vector<Run> packed_;  // of the step; kept, as its memory is used again
};

}  // namespace helm::cuda
