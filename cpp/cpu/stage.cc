#include "cpu/stage.h"

#include <cmath>
#include <functional>

#include "cpu/workspace.h"

namespace helm::cpu {

namespace {

Workspace workspace_of(const Plan& plan, std::span<const UnitSpec> units,
                       const KernelTable& kernels) {
  Workspace workspace(plan, kernels.scratch_bytes);
  for (const UnitSpec& unit : units) workspace.add(unit);
  return workspace;
}

}  // namespace

CpuStage::CpuStage(const StageSpec& spec, const KernelTable& kernels, ThreadPool& threads,
                   OpTimes* times, const IntegerTable& integers)
    : plan_(*spec.plan),
      threads_(threads),
      bindings_{plan_, spec.weights, spec.kv, kernels, integers, {}, {}, {}, {}, {}},
      times_(times) {
  for (const DeviceAddress value : spec.values) {
    bindings_.values.push_back(host_pointer<float>(value));
  }
  bind_workspace(spec);
  if (times != nullptr) bindings_.experts = &times->experts;
  for (const UnitSpec& unit : spec.units) {
    for (const Op& op : unit.ops) {
      ops_.push_back(bind_op(op, bindings_));
      kinds_.push_back(op_kind(op));
    }
  }
  BoundOp* product = nullptr;
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (kinds_[i] == OpKind::kLinear) product = ops_[i].get();
    if (kinds_[i] == OpKind::kAttention && product != nullptr) product->set_next(*ops_[i]);
  }
}

CpuStage::~CpuStage() = default;

std::unique_ptr<Matrix> Bindings::matrix(TensorIndex tensor) const {
  const auto& [address, format] = weights[static_cast<size_t>(tensor)];
  const TensorSpec& spec = plan.tensors[static_cast<size_t>(tensor)];
  return make_matrix(format, host_pointer(address), spec.rows(), spec.cols(), kernels, integers);
}

KvPages Bindings::pages(int64_t entry) const {
  const auto e = static_cast<size_t>(entry);
  return {host_pointer(kv[e]), plan.kv, plan.kv.layers[e].kv_heads};
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
  rotates_ = w.rotates();
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
