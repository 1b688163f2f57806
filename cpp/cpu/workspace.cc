#include "cpu/workspace.h"

#include <algorithm>
#include <variant>

#include "base/arena.h"
#include "cpu/experts.h"
#include "cpu/key_bias.h"
#include "cpu/matrix.h"
#include "cpu/route.h"
#include "cpu/stage.h"

namespace helm::cpu {
namespace {

constexpr int64_t kPageBytes = 4096;

}  // namespace

int64_t rope_table_bytes(const Plan& plan, const RopeTable& table) {
  const auto half = static_cast<int64_t>(table.inv_freq.size());
  return align_up(plan.limits.step_tokens * half * int64_t{sizeof(float)}, kCacheLine);
}

Workspace::Workspace(const Plan& plan, int64_t (*scratch_bytes)(int64_t head_dim))
    : turn_bytes(align_up(cpu::turn_bytes(plan), kPageBytes)),
      plan_(plan),
      scratch_bytes_(scratch_bytes) {
  add_worker(std::max(kCacheLine, scratch_bytes(0)));
}

void Workspace::add(const UnitSpec& unit) {
  for (const Op& op : unit.ops) {
    if (const auto* o = std::get_if<AttentionOp>(&op)) {
      attend(o->heads, o->kv_heads, o->head_dim);
    } else if (const auto* a = std::get_if<AttendOp>(&op)) {
      attend(a->heads, a->kv_heads, a->head_dim);
    } else if (const auto* p = std::get_if<PositionEmbeddingOp>(&op)) {
      add_worker(plan_.values[static_cast<size_t>(p->out)].width *
                 int64_t{sizeof(float)});  // a row
    } else if (const auto* l = std::get_if<LinearOp>(&op)) {
      add_linear(*l);
    } else if (const auto* e = std::get_if<ExpertsOp>(&op)) {
      add_experts(*e);
    } else if (const auto* r = std::get_if<RouteOp>(&op)) {
      add_worker(route_scratch_floats(plan_.values[static_cast<size_t>(r->in)].width) *
                 int64_t{sizeof(float)});
    } else if (std::holds_alternative<RopeOp>(op) && rope_bytes == 0) {
      for (const RopeTable& table : plan_.rope) rope_bytes += 2 * rope_table_bytes(plan_, table);
    }
  }
}

void Workspace::attend(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  add_worker(align_up(scratch_bytes_(head_dim), kCacheLine) +
             attention_worker_bytes(heads, kv_heads, head_dim));
  partials_bytes =
      std::max(partials_bytes,
               align_up(attention_partials_bytes(plan_, heads, kv_heads, head_dim), kCacheLine));
}

void Workspace::add_linear(const LinearOp& op) {
  const ValueSpec& in = plan_.values[static_cast<size_t>(op.in)];
  const int64_t rows = in.per_output ? plan_.limits.step_outputs : plan_.limits.step_tokens;
  packed_bytes = std::max(packed_bytes, cpu::packed_bytes(rows, in.width));
  add_worker(few_tokens_bytes(in.width));
}

void Workspace::add_experts(const ExpertsOp& op) {
  const ValueSpec& in = plan_.values[static_cast<size_t>(op.in)];
  const int64_t rows = in.per_output ? plan_.limits.step_outputs : plan_.limits.step_tokens;
  packed_bytes = std::max(packed_bytes, ExpertsRoom(op, rows, in.width).bytes());
  add_worker(align_up(std::max(kCacheLine, scratch_bytes_(0)), kCacheLine) +
             ExpertsWorker::bytes(in.width, op.size));
}

void Workspace::add_worker(int64_t bytes) {
  worker_bytes = std::max(worker_bytes, align_up(bytes, kPageBytes));
}

}  // namespace helm::cpu
