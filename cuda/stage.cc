#include "cuda/stage.h"

#include <algorithm>
#include <mutex>

#include "cuda/check.h"
#include "cuda/device.h"

namespace helm::cuda {

CudaStage::CudaStage(const StageSpec& spec, const WorkspaceLayout& layout, int ordinal, bool graphs,
                     std::shared_ptr<Blas> blas)
    : plan_(*spec.plan),
      ordinal_(ordinal),
      graphs_(graphs),
      blas_(std::move(blas)),
      workspace_(reinterpret_cast<std::byte*>(spec.workspace)),
      blas_bytes_(layout.blas_bytes),
      upload_(*spec.plan, spec.units, ordinal, workspace_ + layout.steps_offset),
      ops_(bind_ops({spec, upload_, workspace_ + layout.narrow_offset,
                     workspace_ + layout.partials_offset})) {}

StepShape CudaStage::shape_of(const StepView& step) const {
  int64_t rows = 0;
  int64_t longest = 1;  // positions in the pages of a run
  for (const SequenceRun& run : step.runs) {
    const int64_t page_tokens = plan_.kv.page_tokens;
    const int64_t end =
        std::min(run.first_position + run.tokens, run.blocks_end(page_tokens) * page_tokens);
    rows += run.tokens;
    longest = std::max(longest, end - run.first_block * page_tokens);
  }
  return {step.tokens(), step.outputs(), static_cast<int64_t>(step.runs.size()),
          attention_splits(step.tokens(), plan_.kv.kv_heads, longest), rows};
}

void CudaStage::run(Stream& stream, const StepView& step) {
  use_gpu(ordinal_);
  cudaStream_t handle = static_cast<CudaStream&>(stream).handle();
  upload_.enqueue(step, handle);
  const StepShape shape = shape_of(step);
  const std::lock_guard lock(blas_->mutex());
  if (graphs_ && ops_.size() > 1 && shape.decodes()) {  // one op alone gains nothing
    cache_.run(shape, handle, [&] { launch(shape, handle); });
  } else {
    launch(shape, handle);
  }
}

void CudaStage::launch(const StepShape& shape, cudaStream_t stream) const {
  if (blas_bytes_ > 0) blas_->bind(stream, workspace_, blas_bytes_);
  const StepContext context{shape, upload_.tables(), *blas_, stream};
  for (const std::unique_ptr<BoundOp>& op : ops_) {
    op->launch(context);
    check(cudaGetLastError(), op->name());
  }
}

}  // namespace helm::cuda
