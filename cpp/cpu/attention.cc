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

// Where K and V of an op's rows lie and go.
class KvLayer {
 public:
  KvLayer(const Bindings& b, ValueIndex in, int64_t layer)
      : in_(b.value(in)), in_width_(b.width(in)), layer_(layer), kv_(b.kv), kernels_(b.kernels) {}

  int32_t page_of(const SequenceRun& run, int64_t block) const {
    return run.pages[(block - run.first_block) * kv_.spec.layers + layer_];
  }

  void append(const StepView& step, Team& team, int64_t k_offset, int64_t v_offset) const {
    const KvSpec& spec = kv_.spec;
    const auto items = static_cast<int64_t>(step.runs.size()) * spec.kv_heads;
    const auto narrow = kernels_.narrow[static_cast<int>(spec.dtype)];
    const int64_t row_bytes = spec.head_dim * dtype_bytes(spec.dtype);
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const SequenceRun& run = step.runs[static_cast<size_t>(item / spec.kv_heads)];
        const int64_t head = item % spec.kv_heads;
        for (int64_t t = 0; t < run.tokens; ++t) {
          const int64_t position = run.first_position + t;
          const int32_t page = page_of(run, position / spec.page_tokens);
          const int64_t slot = position % spec.page_tokens;
          const float* row = in_ + (run.first_row + t) * in_width_ + head * spec.head_dim;
          narrow(row + k_offset, kv_.keys(page, head) + slot * row_bytes, spec.head_dim);
          narrow(row + v_offset, kv_.values(page, head) + slot * row_bytes, spec.head_dim);
        }
      }
    });
  }

  const float* in() const { return in_; }
  int64_t in_width() const { return in_width_; }
  const KvPages& kv() const { return kv_; }

 private:
  const float* in_;  // [tokens, in_width]
  int64_t in_width_;
  int64_t layer_;
  KvPages kv_;
  const KernelTable& kernels_;
};

// What the attention of an op and its pieces need to know.
struct AttentionShape {
  int64_t q_offset;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;

  int64_t group() const { return heads / kv_heads; }  // query heads per KV head
};

// Attention over the pages of one layer, split over the team: partial results of (run, KV head,
// queries) handed to `deliver(run, head, first, count, partial)`.
class PageAttention {
 public:
  PageAttention(const Bindings& b, KvLayer layer, const AttentionShape& shape, int64_t worker_bytes)
      : shape_(shape),
        layer_(layer),
        kernels_(b.kernels),
        scratch_(b.scratch),
        partials_(reinterpret_cast<float*>(b.partials)),
        kernel_scratch_offset_(worker_bytes) {}

  template <typename Deliver>
  void attend(const StepView& step, Team& team, const Deliver& deliver) const {
    if (step.tokens() == static_cast<int64_t>(step.runs.size())) {
      attend_decode(step, team, deliver);
    } else {
      attend_prefill(step, team, deliver);
    }
  }

 private:
  // Blocks of a run that are to be attended to and that some query of [first, first + count) sees.
  struct Blocks {
    int64_t begin, end;
    int64_t count() const { return end - begin; }
  };
  Blocks blocks(const SequenceRun& run, int64_t first, int64_t count) const {
    const int64_t tokens = layer_.kv().spec.page_tokens;
    const int64_t position = run.first_position + first;
    Blocks b{0, (position + count - 1) / tokens + 1};
    if (shape_.window > 0) b.begin = std::max<int64_t>(0, position - shape_.window + 1) / tokens;
    b.begin = std::max(b.begin, run.first_block);
    b.end = std::max(b.begin, std::min(b.end, run.end_block));
    return b;
  }

  // Partial attention of queries [first, first + count) of a run over one page of one KV head.
  void attend_page(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
                   int64_t block, const Partial& out, int worker) const {
    const KvPages& kv = layer_.kv();
    const int64_t first_key = block * kv.spec.page_tokens;
    const int32_t page = layer_.page_of(run, block);
    AttentionArgs args{};
    args.q = layer_.in() + (run.first_row + first) * layer_.in_width() + shape_.q_offset +
             head * shape_.group() * shape_.head_dim;
    args.q_stride = layer_.in_width();
    args.queries = count;
    args.group = shape_.group();
    args.head_dim = shape_.head_dim;
    args.first_query = run.first_position + first;
    args.first_key = first_key;
    args.window = shape_.window;
    args.scale = shape_.scale;
    args.span.k = kv.keys(page, head);
    args.span.v = kv.values(page, head);
    args.span.count = std::min(kv.spec.page_tokens, args.first_query + count - first_key);
    args.m = out.m;
    args.s = out.s;
    args.o = out.o;
    args.scratch = scratch_[static_cast<size_t>(worker)] + kernel_scratch_offset_;
    kernels_.attention[static_cast<int>(kv.spec.dtype)](args);
  }

  void merge(const Partial& into, const Partial& from, int64_t rows) const {
    kernels_.attention_merge(rows, shape_.head_dim, into.m, into.s, into.o, from.m, from.s, from.o);
  }

  // Pieces of (run, KV head, block of queries); each walks its pages.
  template <typename Deliver>
  void attend_prefill(const StepView& step, Team& team, const Deliver& deliver) const {
    int64_t items = 0;
    for (const SequenceRun& run : step.runs) items += pieces(run);
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        prefill_piece(step, item, team.worker(), deliver);
      }
    });
  }

  int64_t pieces(const SequenceRun& run) const {
    return (run.tokens + kQueryBlock - 1) / kQueryBlock * shape_.kv_heads;
  }

  template <typename Deliver>
  void prefill_piece(const StepView& step, int64_t item, int worker, const Deliver& deliver) const {
    size_t r = 0;
    while (item >= pieces(step.runs[r])) item -= pieces(step.runs[r++]);
    const SequenceRun& run = step.runs[r];
    const int64_t head = item % shape_.kv_heads;
    const int64_t first = item / shape_.kv_heads * kQueryBlock;
    const int64_t count = std::min(kQueryBlock, run.tokens - first);
    const int64_t rows = count * shape_.group();
    auto* base = reinterpret_cast<float*>(scratch_[static_cast<size_t>(worker)]);
    const Partial total = Partial::at(base, rows);
    const Partial page = Partial::at(base + Partial::floats(rows, shape_.head_dim), rows);
    const Blocks here = blocks(run, first, count);
    if (here.count() == 0) return;
    for (int64_t block = here.begin; block < here.end; ++block) {
      const bool fresh = block == here.begin;
      attend_page(run, head, first, count, block, fresh ? total : page, worker);
      if (!fresh) merge(total, page, rows);
    }
    deliver(run, head, first, count, total);
  }

  // Every run has one token: pieces of (run, KV head, page), so that one long sequence occupies all
  // members; then each (run, KV head) merges its pages.
  template <typename Deliver>
  void attend_decode(const StepView& step, Team& team, const Deliver& deliver) const {
    const int64_t partial_floats = Partial::floats(shape_.group(), shape_.head_dim);
    int64_t items = 0;
    for (const SequenceRun& run : step.runs) items += blocks(run, 0, 1).count() * shape_.kv_heads;
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        int64_t local = item;
        size_t r = 0;
        Blocks here = blocks(step.runs[0], 0, 1);
        while (local >= here.count() * shape_.kv_heads) {
          local -= here.count() * shape_.kv_heads;
          here = blocks(step.runs[++r], 0, 1);
        }
        const int64_t head = local / here.count();
        attend_page(step.runs[r], head, 0, 1, here.begin + local % here.count(),
                    Partial::at(partials_ + item * partial_floats, shape_.group()), team.worker());
      }
    });
    team.barrier();
    team.parallel_for(static_cast<int64_t>(step.runs.size()) * shape_.kv_heads, 1,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t item = begin; item < end; ++item) {
                          merge_decode(step, item, deliver);
                        }
                      });
  }

  template <typename Deliver>
  void merge_decode(const StepView& step, int64_t item, const Deliver& deliver) const {
    const int64_t partial_floats = Partial::floats(shape_.group(), shape_.head_dim);
    const auto r = static_cast<size_t>(item / shape_.kv_heads);
    const int64_t head = item % shape_.kv_heads;
    int64_t first_item = 0;
    for (size_t i = 0; i < r; ++i) {
      first_item += blocks(step.runs[i], 0, 1).count() * shape_.kv_heads;
    }
    const SequenceRun& run = step.runs[r];
    const int64_t count = blocks(run, 0, 1).count();
    if (count == 0) return;
    float* base = partials_ + (first_item + head * count) * partial_floats;
    const Partial total = Partial::at(base, shape_.group());
    for (int64_t i = 1; i < count; ++i) {
      merge(total, Partial::at(base + i * partial_floats, shape_.group()), shape_.group());
    }
    deliver(run, head, 0, 1, total);
  }

  AttentionShape shape_;
  KvLayer layer_;
  const KernelTable& kernels_;
  const std::vector<std::byte*>& scratch_;
  float* partials_;                // [runs * kv_heads * blocks] partials of one decode step
  int64_t kernel_scratch_offset_;  // the kernel's scratch begins after this worker's partials
};

AttentionShape shape_of(const AttentionOp& op) {
  return {op.q_offset, op.heads, op.kv_heads, op.head_dim, op.scale, op.window};
}
AttentionShape shape_of(const AttendOp& op) {
  return {op.q_offset, op.heads, op.kv_heads, op.head_dim, op.scale, op.window};
}

class BoundAttention : public BoundOp {
 public:
  BoundAttention(const AttentionOp& op, const Bindings& b)
      : op_(op),
        out_(b.value(op.out)),
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

 private:
  // Normalises the partial and scatters it to the rows of the output.
  void finish(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
              const Partial& partial) const {
    const int64_t group = op_.heads / op_.kv_heads;
    const int64_t width = op_.heads * op_.head_dim;
    kernels_.attention_finish(count * group, op_.head_dim, partial.s, partial.o);
    for (int64_t i = 0; i < count; ++i) {
      const float* from = partial.o + i * group * op_.head_dim;
      std::copy_n(from, group * op_.head_dim,
                  out_ + (run.first_row + first + i) * width + head * group * op_.head_dim);
    }
  }

  AttentionOp op_;
  float* out_;  // [tokens, heads * head_dim]
  const KernelTable& kernels_;
  KvLayer layer_;
  PageAttention attention_;
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
  PageAttention attention_;
};

class BoundMerge : public BoundOp {
 public:
  BoundMerge(const MergeOp& op, const Bindings& b)
      : op_(op),
        first_(b.value(op.first)),
        second_(b.value(op.second)),
        out_(b.value(op.out)),
        kernels_(b.kernels) {}

  void run(const StepView& step, Team& team) const override {
    const int64_t width = op_.heads * op_.head_dim;
    team.parallel_for(step.tokens(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const PartialRow a = PartialRow::at(first_, t, op_.heads, op_.head_dim);
        const PartialRow b = PartialRow::at(second_, t, op_.heads, op_.head_dim);
        kernels_.attention_merge(op_.heads, op_.head_dim, a.m, a.s, a.o, b.m, b.s, b.o);
        kernels_.attention_finish(op_.heads, op_.head_dim, a.s, a.o);
        std::copy_n(a.o, width, out_ + t * width);
      }
    });
  }

 private:
  MergeOp op_;
  float* first_;   // [tokens, heads * (head_dim + 2)]
  float* second_;  // likewise
  float* out_;     // [tokens, heads * head_dim]
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
