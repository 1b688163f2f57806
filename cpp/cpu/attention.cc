// The attention ops of a CPU stage: the whole of attention, and its pieces.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/arena.h"
#include "cpu/page_attention.h"
#include "cpu/stage.h"

namespace helm::cpu {
namespace {

AttentionShape shape_of(const AttentionOp& op) {
  return {op.q_offset, op.heads, op.kv_heads, op.head_dim, op.scale, op.window, op.softcap};
}
AttentionShape shape_of(const AttendOp& op) {
  return {op.q_offset, op.heads, op.kv_heads, op.head_dim, op.scale, op.window, op.softcap};
}

// Adds to the softmax's sums of `count` heads from `first` on what their sinks are in it.
void add_sinks(const float* sinks, int64_t first, int64_t count, const float* m, float* s) {
  for (int64_t h = 0; sinks != nullptr && h < count; ++h) s[h] += std::exp(sinks[first + h] - m[h]);
}

class BoundAttention : public BoundOp {
 public:
  BoundAttention(const AttentionOp& op, const Bindings& b)
      : op_(op),
        out_(b.value(op.out)),
        sinks_(b.vector(op.sinks)),
        kernels_(b.kernels),
        layer_(b, op.in, op.layer),
        attention_(b, layer_, shape_of(op),
                   attention_worker_bytes(op.heads, op.kv_heads, op.head_dim)) {}

  void run(const StepView& step, Team& team) const override {
    layer_.append(step, team, op_.k_offset, op_.v_offset);
    team.barrier();
    attention_.attend(step, team,
                      [&](const SequenceRun& run, int64_t head, int64_t first, int64_t count,
                          const Partial& partial) { finish(run, head, first, count, partial); });
  }
  void first_reads(const StepView& step, const Team& team, FirstReads& reads) const override {
    attention_.first_reads(step, team, reads);
  }

 private:
  // Adds sinks, normalises the partial and scatters it to the rows of the output.
  void finish(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
              const Partial& partial) const {
    const int64_t group = op_.heads / op_.kv_heads;
    const int64_t width = op_.heads * op_.head_dim;
    for (int64_t i = 0; i < count; ++i) {
      add_sinks(sinks_, head * group, group, partial.m + i * group, partial.s + i * group);
    }
    kernels_.attention_finish(count * group, op_.head_dim, partial.s, partial.o);
    for (int64_t i = 0; i < count; ++i) {
      const float* from = partial.o + i * group * op_.head_dim;
      std::copy_n(from, group * op_.head_dim,
                  out_ + (run.first_row + first + i) * width + head * group * op_.head_dim);
    }
  }

  AttentionOp op_;
  float* out_;          // [tokens, heads * head_dim]
  const float* sinks_;  // [heads] or null
  const KernelTable& kernels_;
  KvLayer layer_;
  PageAttention<Parts::kTotal> attention_;
};

// A row of a partial's value: maxima and sums of all heads, then their outputs.
struct PartialRow {
  float* m;  // [heads]
  float* s;  // [heads]
  float* o;  // [heads, head_dim]

  static PartialRow at(float* value, int64_t row, int64_t heads, int64_t head_dim) {
    float* base = value + row * heads * (head_dim + 2);
    return {base, base + heads, base + 2 * heads};
  }
};

class BoundAppend : public BoundOp {
 public:
  BoundAppend(const AppendOp& op, const Bindings& b) : op_(op), layer_(b, op.in, op.layer) {}

  void run(const StepView& step, Team& team) const override {
    layer_.append(step, team, op_.k_offset, op_.v_offset);
  }

 private:
  AppendOp op_;
  KvLayer layer_;
};

class BoundReset : public BoundOp {
 public:
  BoundReset(const ResetOp& op, const Bindings& b) : op_(op), partial_(b.value(op.partial)) {}

  void run(const StepView& step, Team& team) const override {
    team.parallel_for(step.tokens(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const PartialRow row = PartialRow::at(partial_, t, op_.heads, op_.head_dim);
        std::fill_n(row.m, op_.heads, -std::numeric_limits<float>::infinity());
        std::fill_n(row.s, op_.heads * (op_.head_dim + 1), 0.0F);
      }
    });
  }

 private:
  ResetOp op_;
  float* partial_;  // [tokens, heads * (head_dim + 2)]
};

class BoundAttend : public BoundOp {
 public:
  BoundAttend(const AttendOp& op, const Bindings& b)
      : op_(op),
        partial_(b.value(op.partial)),
        kernels_(b.kernels),
        attention_(b, KvLayer(b, op.in, op.layer), shape_of(op),
                   attention_worker_bytes(op.heads, op.kv_heads, op.head_dim)) {}

  void run(const StepView& step, Team& team) const override {
    const int64_t group = op_.heads / op_.kv_heads;
    attention_.attend(step, team,
                      [&](const SequenceRun& run, int64_t head, int64_t first, int64_t count,
                          const Partial& from) {
                        for (int64_t i = 0; i < count; ++i) {
                          const PartialRow into = PartialRow::at(
                              partial_, run.first_row + first + i, op_.heads, op_.head_dim);
                          kernels_.attention_merge(
                              group, op_.head_dim, into.m + head * group, into.s + head * group,
                              into.o + head * group * op_.head_dim, from.m + i * group,
                              from.s + i * group, from.o + i * group * op_.head_dim);
                        }
                      });
  }

 private:
  AttendOp op_;
  float* partial_;  // [tokens, heads * (head_dim + 2)]
  const KernelTable& kernels_;
  PageAttention<Parts::kEachPage> attention_;
};

class BoundMerge : public BoundOp {
 public:
  BoundMerge(const MergeOp& op, const Bindings& b)
      : op_(op),
        first_(b.value(op.first)),
        second_(b.value(op.second)),
        out_(b.value(op.out)),
        sinks_(b.vector(op.sinks)),
        kernels_(b.kernels) {}

  void run(const StepView& step, Team& team) const override {
    const int64_t width = op_.heads * op_.head_dim;
    team.parallel_for(step.tokens(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const PartialRow a = PartialRow::at(first_, t, op_.heads, op_.head_dim);
        const PartialRow b = PartialRow::at(second_, t, op_.heads, op_.head_dim);
        kernels_.attention_merge(op_.heads, op_.head_dim, a.m, a.s, a.o, b.m, b.s, b.o);
        add_sinks(sinks_, 0, op_.heads, a.m, a.s);
        kernels_.attention_finish(op_.heads, op_.head_dim, a.s, a.o);
        std::copy_n(a.o, width, out_ + t * width);
      }
    });
  }

 private:
  MergeOp op_;
  float* first_;        // [tokens, heads * (head_dim + 2)]
  float* second_;       // likewise
  float* out_;          // [tokens, heads * head_dim]
  const float* sinks_;  // [heads] or null
  const KernelTable& kernels_;
};

}  // namespace

int64_t attention_worker_bytes(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t rows = kQueryBlock * (heads / kv_heads);
  return align_up(2 * Partial::floats(rows, head_dim) * int64_t{sizeof(float)}, kCacheLine);
}

int64_t attention_partials_bytes(const Plan& plan, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim) {
  const int64_t blocks = (plan.limits.context + plan.kv.page_tokens - 1) / plan.kv.page_tokens;
  return plan.limits.sequences * kv_heads * blocks * Partial::floats(heads / kv_heads, head_dim) *
         int64_t{sizeof(float)};
}

std::unique_ptr<BoundOp> bind_attention(const AttentionOp& op, const Bindings& bindings) {
  return std::make_unique<BoundAttention>(op, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const AppendOp& op, const Bindings& bindings) {
  return std::make_unique<BoundAppend>(op, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const ResetOp& op, const Bindings& bindings) {
  return std::make_unique<BoundReset>(op, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const AttendOp& op, const Bindings& bindings) {
  return std::make_unique<BoundAttend>(op, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const MergeOp& op, const Bindings& bindings) {
  return std::make_unique<BoundMerge>(op, bindings);
}

}  // namespace helm::cpu
