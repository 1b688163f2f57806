#include "cpu/stage.h"

#include <algorithm>
#include <cmath>
#include <variant>

namespace helm::cpu {

CpuStage::CpuStage(const Plan& plan, std::span<const UnitSpec> units,
                   std::span<const void* const> weights, KvPages kv, const KernelTable& kernels,
                   int threads)
    : plan_(plan), bindings_{plan, weights, kv, kernels, {}, {}, {}, {}, nullptr} {
  bind_values();
  bind_workspace(threads);
  for (const UnitSpec& unit : units) {
    for (const Op& op : unit.ops) ops_.push_back(bind_op(op, bindings_));
  }
}

CpuStage::~CpuStage() = default;

void CpuStage::bind_values() {
  const auto bytes = [&](const ValueSpec& value) {
    const int64_t rows = value.per_output ? plan_.limits.step_outputs : plan_.limits.step_tokens;
    return align_up(rows * value.width * int64_t{sizeof(float)}, kCacheLine);
  };
  int64_t total = 0;
  for (const ValueSpec& value : plan_.values) total += bytes(value);
  values_ = Arena(total, "activations");
  std::byte* next = values_.data();
  for (const ValueSpec& value : plan_.values) {
    bindings_.values.push_back(reinterpret_cast<float*>(next));
    next += bytes(value);
  }
}

void CpuStage::bind_workspace(int threads) {
  int64_t max_cols = 1;
  int64_t worker_bytes = kCacheLine;
  int64_t partials_bytes = 0;
  for (const ValueSpec& value : plan_.values) max_cols = std::max(max_cols, value.width);
  for (const UnitSpec& unit : plan_.units) {
    for (const Op& op : unit.ops) {
      if (const auto* attention = std::get_if<AttentionOp>(&op)) {
        const int64_t kernel_bytes = bindings_.kernels.scratch_bytes(
            max_cols, plan_.limits.step_tokens, attention->heads / attention->kv_heads,
            attention->head_dim);
        worker_bytes = std::max(worker_bytes, align_up(kernel_bytes, kCacheLine) +
                                                  attention_worker_bytes(plan_, *attention));
        partials_bytes = std::max(partials_bytes, attention_partials_bytes(plan_, *attention));
      }
    }
  }
  worker_bytes = std::max(worker_bytes, bindings_.kernels.scratch_bytes(max_cols, 1, 1, 1));
  worker_bytes = align_up(worker_bytes, 4096);  // members never share a page
  int64_t rope_bytes = 0;
  const auto table_bytes = [&](const RopeTable& table) {
    return align_up(plan_.limits.step_tokens * static_cast<int64_t>(table.inv_freq.size()) *
                        int64_t{sizeof(float)},
                    kCacheLine);
  };
  for (const RopeTable& table : plan_.rope) rope_bytes += 2 * table_bytes(table);

  workspace_ = Arena(threads * worker_bytes + align_up(partials_bytes, kCacheLine) + rope_bytes,
                     "the workspace");
  std::byte* next = workspace_.data();
  for (int worker = 0; worker < threads; ++worker, next += worker_bytes) {
    bindings_.scratch.push_back(next);
  }
  bindings_.partials = next;
  next += align_up(partials_bytes, kCacheLine);
  for (const RopeTable& table : plan_.rope) {
    bindings_.cosines.push_back(reinterpret_cast<float*>(next));
    next += table_bytes(table);
    bindings_.sines.push_back(reinterpret_cast<float*>(next));
    next += table_bytes(table);
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

void CpuStage::run(const StepView& step, ThreadPool& threads) const {
  threads.run([&](Team& team) {
    if (!plan_.rope.empty()) fill_rope_tables(step, team);
    for (const std::unique_ptr<BoundOp>& op : ops_) {
      op->run(step, team);
      team.barrier();
    }
  });
}

}  // namespace helm::cpu
