// Attention of a CPU stage: appends the step's keys and values to their pages, then attends page by
// page and merges the partial results in page order. Whichever way the work is shared, the same
// partials are merged in the same order, so the result does not depend on batch, chunk or threads.
#include <algorithm>
#include <limits>

#include "base/arena.h"
#include "cpu/stage.h"

namespace helm::cpu {
namespace {

// Queries that one piece of prefill work holds: enough to reuse each key, few enough that their
// outputs stay in L1/L2 and that pieces outnumber threads.
constexpr int64_t kQueryBlock = 32;

// Partial results of `rows` (query, head) pairs.
struct Partial {
  float* m;  // [rows]
  float* s;  // [rows]
  float* o;  // [rows, head_dim]

  static int64_t floats(int64_t rows, int64_t head_dim) {
    return align_up(rows, 16) * 2 + align_up(rows * head_dim, 16);
  }
  static Partial at(float* base, int64_t rows) {
    return {base, base + align_up(rows, 16), base + 2 * align_up(rows, 16)};
  }
};

class BoundAttention : public BoundOp {
 public:
  BoundAttention(const AttentionOp& op, const Bindings& b)
      : op_(op),
        group_(op.heads / op.kv_heads),
        in_(b.value(op.in)),
        in_width_(b.width(op.in)),
        out_(b.value(op.out)),
        kv_(b.kv),
        kernels_(b.kernels),
        scratch_(b.scratch),
        partials_(reinterpret_cast<float*>(b.partials)),
        kernel_scratch_offset_(attention_worker_bytes(b.plan, op)) {}

  void run(const StepView& step, Team& team) const override {
    append(step, team);
    team.barrier();
    if (step.tokens() == static_cast<int64_t>(step.runs.size())) {
      attend_decode(step, team);
    } else {
      attend_prefill(step, team);
    }
  }

 private:
  int32_t page_of(const SequenceRun& run, int64_t block) const {
    return run.pages[block * kv_.spec.layers + op_.layer];
  }

  void append(const StepView& step, Team& team) const {
    const auto items = static_cast<int64_t>(step.runs.size()) * op_.kv_heads;
    const auto narrow = kernels_.narrow[static_cast<int>(kv_.spec.dtype)];
    const int64_t row_bytes = op_.head_dim * dtype_bytes(kv_.spec.dtype);
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const SequenceRun& run = step.runs[static_cast<size_t>(item / op_.kv_heads)];
        const int64_t head = item % op_.kv_heads;
        for (int64_t t = 0; t < run.tokens; ++t) {
          const int64_t position = run.first_position + t;
          const int32_t page = page_of(run, position / kv_.spec.page_tokens);
          const int64_t slot = position % kv_.spec.page_tokens;
          const float* row = in_ + (run.first_row + t) * in_width_ + head * op_.head_dim;
          narrow(row + op_.k_offset, kv_.keys(page, head) + slot * row_bytes, op_.head_dim);
          narrow(row + op_.v_offset, kv_.values(page, head) + slot * row_bytes, op_.head_dim);
        }
      }
    });
  }

  // Partial attention of queries [first, first + count) of a run over one page of one KV head.
  void attend_page(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
                   int64_t block, const Partial& out, int worker) const {
    const int64_t first_key = block * kv_.spec.page_tokens;
    const int32_t page = page_of(run, block);
    AttentionArgs args{};
    args.q =
        in_ + (run.first_row + first) * in_width_ + op_.q_offset + head * group_ * op_.head_dim;
    args.q_stride = in_width_;
    args.queries = count;
    args.group = group_;
    args.head_dim = op_.head_dim;
    args.first_query = run.first_position + first;
    args.first_key = first_key;
    args.window = op_.window;
    args.scale = op_.scale;
    args.span.k = kv_.keys(page, head);
    args.span.v = kv_.values(page, head);
    args.span.count = std::min(kv_.spec.page_tokens, args.first_query + count - first_key);
    args.m = out.m;
    args.s = out.s;
    args.o = out.o;
    args.scratch = scratch_[static_cast<size_t>(worker)] + kernel_scratch_offset_;
    kernels_.attention[static_cast<int>(kv_.spec.dtype)](args);
  }

  // Blocks that any query at positions [first, last] can see.
  int64_t first_block(int64_t first_position) const {
    if (op_.window == 0) return 0;
    return std::max<int64_t>(0, first_position - op_.window + 1) / kv_.spec.page_tokens;
  }
  int64_t end_block(int64_t last_position) const {
    return last_position / kv_.spec.page_tokens + 1;
  }

  // Normalises the partial and scatters it to the rows of the output.
  void finish(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
              const Partial& partial) const {
    const int64_t width = op_.heads * op_.head_dim;
    kernels_.attention_finish(count * group_, op_.head_dim, partial.s, partial.o);
    for (int64_t i = 0; i < count; ++i) {
      const float* from = partial.o + i * group_ * op_.head_dim;
      std::copy_n(from, group_ * op_.head_dim,
                  out_ + (run.first_row + first + i) * width + head * group_ * op_.head_dim);
    }
  }

  void merge(const Partial& into, const Partial& from, int64_t rows) const {
    kernels_.attention_merge(rows, op_.head_dim, into.m, into.s, into.o, from.m, from.s, from.o);
  }

  // Pieces of (run, KV head, block of queries); each walks its pages.
  void attend_prefill(const StepView& step, Team& team) const {
    int64_t items = 0;
    for (const SequenceRun& run : step.runs) items += pieces(run);
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) prefill_piece(step, item, team.worker());
    });
  }

  int64_t pieces(const SequenceRun& run) const {
    return (run.tokens + kQueryBlock - 1) / kQueryBlock * op_.kv_heads;
  }

  void prefill_piece(const StepView& step, int64_t item, int worker) const {
    size_t r = 0;
    while (item >= pieces(step.runs[r])) item -= pieces(step.runs[r++]);
    const SequenceRun& run = step.runs[r];
    const int64_t head = item % op_.kv_heads;
    const int64_t first = item / op_.kv_heads * kQueryBlock;
    const int64_t count = std::min(kQueryBlock, run.tokens - first);
    const int64_t rows = count * group_;
    auto* base = reinterpret_cast<float*>(scratch_[static_cast<size_t>(worker)]);
    const Partial total = Partial::at(base, rows);
    const Partial page = Partial::at(base + Partial::floats(rows, op_.head_dim), rows);
    const int64_t begin = first_block(run.first_position + first);
    const int64_t end = end_block(run.first_position + first + count - 1);
    for (int64_t block = begin; block < end; ++block) {
      attend_page(run, head, first, count, block, block == begin ? total : page, worker);
      if (block > begin) merge(total, page, rows);
    }
    finish(run, head, first, count, total);
  }

  // Every run has one token: pieces of (run, KV head, page), so that one long sequence occupies all
  // members; then each (run, KV head) merges its pages.
  void attend_decode(const StepView& step, Team& team) const {
    const int64_t partial_floats = Partial::floats(group_, op_.head_dim);
    int64_t items = 0;
    for (const SequenceRun& run : step.runs) items += blocks(run) * op_.kv_heads;
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        int64_t local = item;
        size_t r = 0;
        while (local >= blocks(step.runs[r]) * op_.kv_heads) {
          local -= blocks(step.runs[r++]) * op_.kv_heads;
        }
        const SequenceRun& run = step.runs[r];
        const int64_t head = local / blocks(run);
        const int64_t block = first_block(run.first_position) + local % blocks(run);
        attend_page(run, head, 0, 1, block, Partial::at(partials_ + item * partial_floats, group_),
                    team.worker());
      }
    });
    team.barrier();
    team.parallel_for(static_cast<int64_t>(step.runs.size()) * op_.kv_heads, 1,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t item = begin; item < end; ++item) merge_decode(step, item);
                      });
  }

  int64_t blocks(const SequenceRun& run) const {
    return end_block(run.first_position) - first_block(run.first_position);
  }

  void merge_decode(const StepView& step, int64_t item) const {
    const int64_t partial_floats = Partial::floats(group_, op_.head_dim);
    const auto r = static_cast<size_t>(item / op_.kv_heads);
    const int64_t head = item % op_.kv_heads;
    int64_t first_item = 0;
    for (size_t i = 0; i < r; ++i) first_item += blocks(step.runs[i]) * op_.kv_heads;
    const SequenceRun& run = step.runs[r];
    float* base = partials_ + (first_item + head * blocks(run)) * partial_floats;
    const Partial total = Partial::at(base, group_);
    for (int64_t i = 1; i < blocks(run); ++i) {
      merge(total, Partial::at(base + i * partial_floats, group_), group_);
    }
    finish(run, head, 0, 1, total);
  }

  AttentionOp op_;
  int64_t group_;    // query heads per KV head
  const float* in_;  // [tokens, in_width]
  int64_t in_width_;
  float* out_;  // [tokens, heads * head_dim]
  KvPages kv_;
  const KernelTable& kernels_;
  const std::vector<std::byte*>& scratch_;
  float* partials_;                // [runs * kv_heads * blocks] partials of one decode step
  int64_t kernel_scratch_offset_;  // the kernel's scratch begins after this worker's partials
};

}  // namespace

int64_t attention_worker_bytes(const Plan&, const AttentionOp& op) {
  const int64_t rows = kQueryBlock * (op.heads / op.kv_heads);
  return align_up(2 * Partial::floats(rows, op.head_dim) * int64_t{sizeof(float)}, kCacheLine);
}

int64_t attention_partials_bytes(const Plan& plan, const AttentionOp& op) {
  const int64_t blocks = (plan.limits.context + plan.kv.page_tokens - 1) / plan.kv.page_tokens;
  return plan.limits.sequences * op.kv_heads * blocks *
         Partial::floats(op.heads / op.kv_heads, op.head_dim) * int64_t{sizeof(float)};
}

std::unique_ptr<BoundOp> bind_attention(const AttentionOp& op, const Bindings& bindings) {
  return std::make_unique<BoundAttention>(op, bindings);
}

}  // namespace helm::cpu
