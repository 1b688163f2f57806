#include "cpu/stage.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <variant>

#include "base/arena.h"

namespace helm::cpu {

namespace {

// Where the parts of a stage's workspace begin, in this order. Stages that share one agree on what
// is filled once, which therefore comes first.
struct Workspace {
  int64_t turn_bytes = 0;
  int64_t worker_bytes = 0;
  int64_t packed_bytes = 0;
  int64_t partials_bytes = 0;
  int64_t rope_bytes = 0;  // cosines and sines of all tables

  int64_t bytes(int threads) const {
    return turn_bytes + threads * worker_bytes + packed_bytes + partials_bytes + rope_bytes;
  }
};

int64_t rope_table_bytes(const Plan& plan, const RopeTable& table) {
  const auto half = static_cast<int64_t>(table.inv_freq.size());
  return align_up(plan.limits.step_tokens * half * int64_t{sizeof(float)}, kCacheLine);
}

bool has_rope(std::span<const UnitSpec> units) {
  for (const UnitSpec& unit : units) {
    for (const Op& op : unit.ops) {
      if (std::holds_alternative<RopeOp>(op)) return true;
    }
  }
  return false;
}

Workspace workspace_of(const Plan& plan, std::span<const UnitSpec> units,
                       const KernelTable& kernels) {
  Workspace w;
  w.turn_bytes = align_up(turn_bytes(plan), 4096);
  w.worker_bytes = std::max(kCacheLine, kernels.scratch_bytes(1));
  const auto attention = [&](int64_t heads, int64_t kv_heads, int64_t head_dim) {
    const int64_t kernel_bytes = kernels.scratch_bytes(head_dim);
    w.worker_bytes =
        std::max(w.worker_bytes, align_up(kernel_bytes, kCacheLine) +
                                     attention_worker_bytes(heads, kv_heads, head_dim));
    w.partials_bytes =
        std::max(w.partials_bytes, attention_partials_bytes(plan, heads, kv_heads, head_dim));
  };
  for (const UnitSpec& unit : units) {
    for (const Op& op : unit.ops) {
      if (const auto* o = std::get_if<AttentionOp>(&op)) {
        attention(o->heads, o->kv_heads, o->head_dim);
      } else if (const auto* a = std::get_if<AttendOp>(&op)) {
        attention(a->heads, a->kv_heads, a->head_dim);
      } else if (const auto* p = std::get_if<PositionEmbeddingOp>(&op)) {
        const int64_t width = plan.values[static_cast<size_t>(p->out)].width;
        w.worker_bytes = std::max(w.worker_bytes, width * int64_t{sizeof(float)});  // a row
      } else if (const auto* l = std::get_if<LinearOp>(&op)) {
        const ValueSpec& in = plan.values[static_cast<size_t>(l->in)];
        const int64_t rows = in.per_output ? plan.limits.step_outputs : plan.limits.step_tokens;
        w.packed_bytes = std::max(w.packed_bytes, packed_bytes(rows, in.width));
        w.worker_bytes = std::max(w.worker_bytes, few_tokens_bytes(in.width));
      }
    }
  }
  w.worker_bytes = align_up(w.worker_bytes, 4096);  // members never share a page
  w.partials_bytes = align_up(w.partials_bytes, kCacheLine);
  if (has_rope(units)) {
    for (const RopeTable& table : plan.rope) w.rope_bytes += 2 * rope_table_bytes(plan, table);
  }
  return w;
}

}  // namespace

CpuStage::CpuStage(const StageSpec& spec, const KernelTable& kernels, ThreadPool& threads,
                   OpTimes* times, const IntegerTable& integers)
    : plan_(*spec.plan),
      threads_(threads),
      bindings_{
          plan_, spec.weights, {host_pointer(spec.kv), plan_.kv}, kernels, integers, {}, {}, {}, {},
          {}},
      times_(times),
      rotates_(has_rope(spec.units)) {
  for (const DeviceAddress value : spec.values) {
    bindings_.values.push_back(host_pointer<float>(value));
  }
  bind_workspace(spec);
  for (const UnitSpec& unit : spec.units) {
    for (const Op& op : unit.ops) {
      ops_.push_back(bind_op(op, bindings_));
      kinds_.push_back(op_kind(op));
    }
  }
}

CpuStage::~CpuStage() = default;

std::unique_ptr<Matrix> Bindings::matrix(TensorIndex tensor) const {
  const auto& [address, format] = weights[static_cast<size_t>(tensor)];
  const TensorSpec& spec = plan.tensors[static_cast<size_t>(tensor)];
  return make_matrix(format, host_pointer(address), spec.rows(), spec.cols(), kernels, integers);
}

int64_t CpuStage::workspace_bytes(const Plan& plan, std::span<const UnitSpec> units,
                                  const KernelTable& kernels, int threads) {
  return workspace_of(plan, units, kernels).bytes(threads);
}

void CpuStage::bind_workspace(const StageSpec& spec) {
  const Workspace w = workspace_of(plan_, spec.units, bindings_.kernels);
  std::byte* next = host_pointer(spec.workspace);
  if (w.turn_bytes > 0) bindings_.turns = fill_turns(plan_, next);
  next += w.turn_bytes;
  for (int worker = 0; worker < threads_.size(); ++worker, next += w.worker_bytes) {
    bindings_.scratch.push_back(next);
  }
  bindings_.packed = next;
  next += w.packed_bytes;
  bindings_.partials = next;
  next += w.partials_bytes;
  if (!rotates_) return;
  for (const RopeTable& table : plan_.rope) {
    bindings_.cosines.push_back(reinterpret_cast<float*>(next));
    next += rope_table_bytes(plan_, table);
    bindings_.sines.push_back(reinterpret_cast<float*>(next));
    next += rope_table_bytes(plan_, table);
  }
}

// angle(t, i) = position(t) * inv_freq(i), rounded to f32 as the reference implementations do.
void CpuStage::fill_rope_tables(const StepView& step, Team& team) const {
  constexpr int64_t kTokensPerChunk = 16;
  team.parallel_for(step.tokens(), kTokensPerChunk, [&](int64_t begin, int64_t end) {
    for (size_t table = 0; table < plan_.rope.size(); ++table) {
      const RopeTable& spec = plan_.rope[table];
      const auto half = static_cast<int64_t>(spec.inv_freq.size());
      float* cosines = bindings_.cosines[table];
      float* sines = bindings_.sines[table];
      for (int64_t t = begin; t < end; ++t) {
        const auto position = static_cast<float>(step.positions[static_cast<size_t>(t)]);
        for (int64_t i = 0; i < half; ++i) {
          const float angle = position * spec.inv_freq[static_cast<size_t>(i)];
          cosines[t * half + i] = std::cos(angle) * spec.attention_factor;
          sines[t * half + i] = std::sin(angle) * spec.attention_factor;
        }
      }
    }
  });
  team.barrier();
}

// As run(), member 0 taking the time of every op up to the barrier after it.
void CpuStage::run_timed(const StepView& step, Team& team) const {
  OpTimes::Clock::time_point begin = OpTimes::Clock::now();
  const auto end = [&](OpKind kind) {
    if (team.worker() != 0) return;
    const OpTimes::Clock::time_point now = OpTimes::Clock::now();
    times_->add(kind, now - begin);
    begin = now;
  };
  if (rotates_) {
    fill_rope_tables(step, team);
    end(OpKind::kRope);
  }
  for (size_t i = 0; i < ops_.size(); ++i) {
    ops_[i]->run(step, team);
    team.barrier();
    end(kinds_[i]);
  }
}

void CpuStage::run(const StepView& step) {
  const bool timed = times_ != nullptr && times_->counting();
  const auto work = [&](Team& team) {
    if (timed) {
      run_timed(step, team);
      return;
    }
    if (rotates_) fill_rope_tables(step, team);
    for (const std::unique_ptr<BoundOp>& op : ops_) {
      op->run(step, team);
      team.barrier();
    }
  };
  threads_.run(std::cref(work));  // by reference, as its captures would be allocated
}

}  // namespace helm::cpu
