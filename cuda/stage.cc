#include "cuda/stage.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <variant>

#include "cuda/check.h"
#include "cuda/device.h"

namespace helm::cuda {

namespace {

std::set<std::pair<int64_t, int64_t>> heads_of(const StageSpec& spec) {
  std::set<std::pair<int64_t, int64_t>> found;
  for (const UnitSpec& unit : spec.units) {
    for (const Op& op : unit.ops) {
      if (const auto* whole = std::get_if<AttentionOp>(&op)) {
        found.insert({whole->heads, whole->kv_heads});
      }
      if (const auto* part = std::get_if<AttendOp>(&op))
        found.insert({part->heads, part->kv_heads});
    }
  }
  return found;
}

}  // namespace

CudaStage::CudaStage(const StageSpec& spec, const WorkspaceLayout& layout,
                     const StageOptions& options, std::shared_ptr<Blas> blas,
                     std::shared_ptr<StepUpload> upload)
    : plan_(*spec.plan),
      heads_(heads_of(spec)),
      options_(options),
      blas_(std::move(blas)),
      blas_workspace_(reinterpret_cast<std::byte*>(spec.workspace) + layout.blas_offset),
      blas_bytes_(layout.blas_bytes),
      upload_(std::move(upload)),
      ops_(bind_ops(
          {spec,
           *upload_,
           reinterpret_cast<std::byte*>(spec.workspace) + layout.narrow_offset,
           {reinterpret_cast<std::byte*>(spec.workspace) + layout.panel_offset, layout.panel_bytes,
            options.compute >= kBf16Compute ? DType::kBF16 : DType::kF16},
           reinterpret_cast<std::byte*>(spec.workspace) + layout.partials_offset,
           options.compute})) {}

StepShape CudaStage::shape_of(const StepView& step) const {
  int64_t rows = 0, singles = 0;
  int64_t longest_single = 1, longest_prompt = 1;  // positions in the pages of a run
  for (const SequenceRun& run : step.runs) {
    const int64_t page_tokens = plan_.kv.page_tokens;
    const int64_t end =
        std::min(run.first_position + run.tokens, run.blocks_end(page_tokens) * page_tokens);
    rows += run.tokens;
    singles += run.tokens == 1;
    int64_t& longest = run.tokens == 1 ? longest_single : longest_prompt;
    longest = std::max(longest, end - run.first_block * page_tokens);
  }
  const auto runs = static_cast<int64_t>(step.runs.size());
  // The least that any attention of the stage takes: the scratch memory of all has room for that.
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t decode = heads_.empty() ? 1 : kMost, prompt = decode;
  for (const auto& [heads, kv_heads] : heads_) {
    decode = std::min(
        decode, decode_splits(options_.multiprocessors, runs, heads, kv_heads, longest_single));
    prompt = std::min(prompt,
                      prompt_splits(prompt_blocks(step.tokens(), heads, kv_heads), longest_prompt));
  }
  return {step.tokens(), step.outputs(),
          runs,          singles,
          decode,        prompt,
          rows,          step.number == 0 ? 0 : step.runs.data() - step.all_runs.data()};
}

void CudaStage::run(Stream& stream, const StepView& step) {
  use_gpu(options_.ordinal);
  cudaStream_t handle = static_cast<CudaStream&>(stream).handle();
  upload_->enqueue(step, handle);
  const StepShape shape = shape_of(step);
  const std::lock_guard lock(blas_->mutex());
  // One op alone gains nothing; the tables of runs that are not the first may lie elsewhere later.
  if (options_.graphs && ops_.size() > 1 && shape.decodes() && shape.first_run == 0) {
    cache_.run(shape, handle, [&] { launch(shape, handle); });
  } else {
    launch(shape, handle);
  }
}

void CudaStage::launch(const StepShape& shape, cudaStream_t stream) const {
  if (blas_bytes_ > 0) blas_->bind(stream, blas_workspace_, blas_bytes_);
  const StepContext context{
      shape, upload_->tables(shape.first_run), *blas_, {stream, options_.overlap}};
  for (const std::unique_ptr<BoundOp>& op : ops_) {
    op->launch(context);
    check(cudaGetLastError(), op->name());
  }
}

}  // namespace helm::cuda
