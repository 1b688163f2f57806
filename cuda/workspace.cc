#include "cuda/workspace.h"

#include <algorithm>
#include <variant>

#include "base/arena.h"
#include "cuda/step_tables.h"
#include "device/device.h"

namespace helm::cuda {
namespace {

template <class Attending>
int64_t partials_bytes(const Plan& plan, const Attending& op) {
  int64_t most = 0;
  const auto add = [&](int64_t rows, int64_t blocks) {
    const int64_t splits = attention_splits(blocks, plan.limits.context);
    most = std::max(most, attention_partials_bytes(rows, op.heads, op.head_dim, splits));
  };
  for (int64_t tokens = 1; tokens <= plan.limits.step_tokens; ++tokens) {
    if (tokens <= plan.limits.sequences) add(tokens, decode_blocks(tokens, op.kv_heads));
    add(tokens, prompt_blocks(tokens, op.heads, op.kv_heads));
  }
  return most;
}

}  // namespace

WorkspaceLayout::WorkspaceLayout(const Plan& plan, std::span<const UnitSpec> units,
                                 int64_t blas_workspace) {
  blas_bytes = 0;
  int64_t narrow_bytes = 0;
  int64_t most_partials = 0;
  int64_t seen_heads = 0;  // blocks of a model attend alike
  const auto add_linear = [&](const UnitSpec& unit, const LinearOp& op) {
    const ValueSpec& in = plan.values[static_cast<size_t>(op.in)];
    const int64_t rows = in.per_output ? plan.limits.step_outputs : plan.limits.step_tokens;
    if (rows <= kMatvecTokens) return;
    blas_bytes = align_up(blas_workspace, kDeviceAlignment);
    for (const LinearOp::Part& part : op.parts) {
      const Format format = plan.format(unit, part.weight);
      if (!is_dense(format) || dtype_of(format) == DType::kF32) continue;
      narrow_bytes = std::max(narrow_bytes, rows * in.width * dtype_bytes(dtype_of(format)));
    }
  };
  const auto add_attending = [&](const auto& op) {
    if (op.heads == seen_heads) return;
    most_partials = std::max(most_partials, partials_bytes(plan, op));
    seen_heads = op.heads;
  };
  for (const UnitSpec& unit : units) {
    for (const Op& op : unit.ops) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) add_linear(unit, *linear);
      if (const auto* attention = std::get_if<AttentionOp>(&op)) add_attending(*attention);
      if (const auto* attend = std::get_if<AttendOp>(&op)) add_attending(*attend);
    }
  }
  blas_offset = align_up(StepLayout(plan).bytes, kDeviceAlignment);
  narrow_offset = blas_offset + blas_bytes;
  partials_offset = narrow_offset + align_up(narrow_bytes, kDeviceAlignment);
  bytes = partials_offset + align_up(most_partials, kDeviceAlignment);
}

}  // namespace helm::cuda
