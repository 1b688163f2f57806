#include "device/stage_bytes.h"

#include <algorithm>
#include <cmath>
#include <variant>

namespace helm {
namespace {

bool has_rows(const Plan& plan, const Op& op, const StepView& step) {
  bool some = false;
  each_value(plan, op, [&](ValueIndex v, Access access) {
    const bool per_output = plan.values[static_cast<size_t>(v)].per_output;
    some = some || (access != Access::kRead && (per_output ? step.outputs() : step.tokens()) > 0);
  });
  return some;
}

// Of a tensor that is read on the CPU and lies on a node of its own.
bool on_node(const Plan& plan, TensorIndex tensor) {
  const SliceSpec* slice = plan.slice(tensor, kCpu);
  return slice != nullptr && slice->node >= 0;
}

int64_t weight_bytes(const StageSpec& stage, const Op& op, int64_t tokens, double node_cost) {
  int64_t bytes = 0;
  each_tensor(op, [&](TensorIndex tensor, Reads reads) {
    const auto index = static_cast<size_t>(tensor);
    const TensorSpec& spec = stage.plan->tensors[index];
    const int64_t whole = format_bytes(stage.weights[index].format, spec.rows(), spec.cols());
    const int64_t own = reads == Reads::kWhole ? whole : tokens * (whole / spec.rows());
    const bool slower = node_cost != 1 && on_node(*stage.plan, tensor);
    bytes += slower ? std::llround(static_cast<double>(own) * node_cost) : own;
  });
  const auto* mixture = std::get_if<ExpertsOp>(&op);
  if (mixture == nullptr) return bytes;
  const double share = mixture->expected(tokens) / static_cast<double>(mixture->experts);
  return std::llround(static_cast<double>(bytes) * share);
}

int64_t seen_positions(const SequenceRun& run, int64_t window, int64_t page_tokens) {
  const int64_t end = run.first_position + run.tokens;
  const int64_t begin = window > 0 ? std::max<int64_t>(0, run.first_position + 1 - window) : 0;
  const int64_t here = std::max(begin, run.first_block * page_tokens);
  return std::max<int64_t>(0, std::min(end, run.blocks_end(page_tokens) * page_tokens) - here);
}

int64_t kv_bytes(const KvSpec& kv, int64_t kv_heads, int64_t window, const StepView& step) {
  const int64_t position = 2 * kv_heads * (kv.row_bytes() + kv_scale_bytes(kv.dtype));
  int64_t positions = 0;
  for (const SequenceRun& run : step.runs) positions += seen_positions(run, window, kv.page_tokens);
  return positions * position;
}

}  // namespace

int64_t stage_bytes(const StageSpec& stage, const StepView& step, double node_cost) {
  int64_t bytes = 0;
  for (const UnitSpec& unit : stage.units) {
    for (const Op& op : unit.ops) {
      if (!has_rows(*stage.plan, op, step)) continue;
      bytes += weight_bytes(stage, op, step.tokens(), node_cost);
      if (const auto* whole = std::get_if<AttentionOp>(&op)) {
        bytes += kv_bytes(stage.plan->kv, whole->kv_heads, whole->window, step);
      } else if (const auto* part = std::get_if<AttendOp>(&op)) {
        bytes += kv_bytes(stage.plan->kv, part->kv_heads, part->window, step);
      }
    }
  }
  return bytes;
}

}  // namespace helm
