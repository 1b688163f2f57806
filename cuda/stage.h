// A stage on a CUDA GPU: ops compiled once to a static program of launches over bound buffers.
#pragma once

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cuda/graphs.h"
#include "cuda/ops.h"
#include "cuda/step_tables.h"
#include "cuda/workspace.h"
#include "device/device.h"

namespace helm::cuda {

struct StageOptions {
  int ordinal;
  int compute;              // the GPU's capability times ten
  int64_t multiprocessors;  // of the GPU
  bool graphs;
  bool overlap;  // launch kernels before the ones before them end (Queue)
};

class CudaStage : public Stage {
 public:
  // `layout` is that of the spec's workspace. Steps in which every sequence has one token are
  // captured and replayed with graphs.
  CudaStage(const StageSpec& spec, const WorkspaceLayout& layout, const StageOptions& options,
            std::shared_ptr<Blas> blas, std::shared_ptr<StepUpload> upload);

  void run(Stream& stream, const StepView& step) override;

  const GraphCache& graphs() const { return cache_; }

 private:
  StepShape shape_of(const StepView& step) const;
  void launch(const StepShape& shape, cudaStream_t stream) const;

  const Plan& plan_;
  std::set<std::pair<int64_t, int64_t>> heads_;  // of queries, of KV: those that attend here
  StageOptions options_;
  std::shared_ptr<Blas> blas_;
  std::byte* blas_workspace_;
  int64_t blas_bytes_;
  std::shared_ptr<StepUpload> upload_;
  std::vector<std::unique_ptr<BoundOp>> ops_;
  GraphCache cache_;
};

}  // namespace helm::cuda
