// Attention over paged KV, shared by a team: appends a step's keys and values to their pages, then
// attends page by page and merges the partial results in page order, or hands out each. Whichever
// way the work is shared, the same partials are merged in the same order, so the result does not
// depend on batch, chunk or threads. Knows nothing of what becomes of the result.
#pragma once

#include <algorithm>
#include <optional>

#include "base/arena.h"
#include "cpu/key_bias.h"
#include "cpu/stage.h"

namespace helm::cpu {

// Queries that one piece of prefill work holds: enough to reuse each key, few enough that their
// outputs stay in L1/L2 and that pieces outnumber threads.
inline constexpr int64_t kQueryBlock = 32;

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
      : in_(b.value(in)),
        in_width_(b.width(in)),
        layer_(layer),
        kv_(b.pages(layer)),
        kernels_(b.kernels),
        scratch_(b.scratch) {
    const std::optional<KeyBias> bias = key_bias(b.plan, layer);
    if (!bias) return;
    bias_ = b.vector(bias->tensor) + bias->offset;
    rotary_ = bias->rotary;
    if (rotary_ > 0) turns_ = b.turns[static_cast<size_t>(bias->table)];
  }

  int32_t page_of(const SequenceRun& run, int64_t block) const {
    return run.pages[(block - run.first_block) * kv_.spec.entries() + layer_];
  }

  void append(const StepView& step, Team& team, int64_t k_offset, int64_t v_offset) const {
    const KvSpec& spec = kv_.spec;
    const auto items = static_cast<int64_t>(step.runs.size()) * kv_.kv_heads;
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const SequenceRun& run = step.runs[static_cast<size_t>(item / kv_.kv_heads)];
        const int64_t head = item % kv_.kv_heads;
        for (int64_t t = 0; t < run.tokens; ++t) {
          const int64_t position = run.first_position + t;
          const int64_t block = position / spec.page_tokens;
          if (block < run.first_block || block >= run.end_block) continue;
          const int32_t page = page_of(run, block);
          const int64_t slot = position % spec.page_tokens;
          const float* row = in_ + (run.first_row + t) * in_width_ + head * spec.head_dim;
          const float* key = row + k_offset;
          if (bias_ != nullptr) {
            auto* rest = reinterpret_cast<float*>(scratch_[static_cast<size_t>(team.worker())]);
            key = less_bias(key, head, position, rest);
          }
          store(key, kv_.keys(page, head), kv_.key_scales(page, head), slot);
          store(row + v_offset, kv_.values(page, head), kv_.value_scales(page, head), slot);
        }
      }
    });
  }

  // Tells attention to a page what its keys lack.
  void add_bias(int64_t head, int64_t block, AttentionArgs* args) const {
    if (rotary_ == 0) return;
    args->bias = bias_ + head * kv_.spec.head_dim;
    args->rotary = rotary_;
    args->block_turns = turns_.blocks + block * key_blocks(kv_.spec) * rotary_;
    args->place_turns = turns_.places;
  }

  const float* in() const { return in_; }
  int64_t in_width() const { return in_width_; }
  const KvPages& kv() const { return kv_; }

 private:
  // rest = key - R(position) bias, as attention adds it.
  const float* less_bias(const float* key, int64_t head, int64_t position, float* rest) const {
    const KvSpec& spec = kv_.spec;
    const float* b = bias_ + head * spec.head_dim;
    const int64_t half = rotary_ / 2, slot = position % spec.page_tokens;
    for (int64_t d = 0; d < spec.head_dim; ++d) rest[d] = key[d] - (d < rotary_ ? 0 : b[d]);
    const int64_t block = position / spec.page_tokens * key_blocks(spec) + slot / kKeyBlock;
    const float* first = turns_.blocks + block * rotary_;
    const float* place = turns_.places + slot % kKeyBlock * rotary_;
    for (int64_t d = 0; d < half; ++d) {
      const float cos = first[d] * place[d] - first[half + d] * place[half + d];
      const float sin = first[half + d] * place[d] + first[d] * place[half + d];
      rest[d] -= b[d] * cos - b[half + d] * sin;
      rest[half + d] -= b[half + d] * cos + b[d] * sin;
    }
    return rest;
  }

  void store(const float* row, std::byte* rows, float* scales, int64_t slot) const {
    const KvSpec& spec = kv_.spec;
    std::byte* to = rows + slot * spec.row_bytes();
    if (scales != nullptr) {
      scales[slot] = kernels_.quantize(row, reinterpret_cast<int8_t*>(to), spec.head_dim);
    } else {
      kernels_.narrow[static_cast<int>(spec.dtype)](row, to, spec.head_dim);
    }
  }

  const float* in_;  // [tokens, in_width]
  int64_t in_width_;
  int64_t layer_;
  KvPages kv_;
  const KernelTable& kernels_;
  const std::vector<std::byte*>& scratch_;
  const float* bias_ = nullptr;  // [kv_heads, head_dim] that the cache's keys lack, or null
  int64_t rotary_ = 0;           // of it
  Turns turns_;
};

// What the attention of an op and its pieces need to know.
struct AttentionShape {
  int64_t q_offset;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;
  float softcap;

  int64_t group() const { return heads / kv_heads; }  // query heads per KV head
};

// Attention over the pages of one layer, split over the team: partial results of (run, KV head,
// queries) handed to `deliver(run, head, first, count, partial)`; each page's, in order, or what
// all of them come to.
enum class Parts : uint8_t { kEachPage, kTotal };
template <Parts kParts>
class PageAttention {
 public:
  PageAttention(const Bindings& b, KvLayer layer, const AttentionShape& shape, int64_t worker_bytes)
      : shape_(shape),
        group_(shape.group()),
        partial_floats_(Partial::floats(group_, shape.head_dim)),
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

  // Of a step in which every run has one token the K and V of this member's pieces.
  void first_reads(const StepView& step, const Team& team, FirstReads& reads) const {
    if (step.tokens() != static_cast<int64_t>(step.runs.size())) return;
    const Team::Part own = team.part(decode_pieces(step));
    for (int64_t item = own.begin; item < own.end; ++item) {
      const DecodePiece piece = decode_piece(step, item);
      const KvSpan keys = span(piece.run, piece.head, 0, 1, piece.block);
      const int64_t bytes = keys.count * layer_.kv().spec.row_bytes();
      if (!reads.add(keys.k, bytes) || !reads.add(keys.v, bytes)) return;
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

  // What queries up to [first, first + count) of a run see of one block.
  KvSpan span(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
              int64_t block) const {
    const KvPages& kv = layer_.kv();
    const int64_t seen = run.first_position + first + count - block * kv.spec.page_tokens;
    return kv.span(layer_.page_of(run, block), head, std::min(kv.spec.page_tokens, seen));
  }

  // Partial attention of queries [first, first + count) of a run over one page of one KV head;
  // `next` is what this worker attends to after it.
  void attend_page(const SequenceRun& run, int64_t head, int64_t first, int64_t count,
                   int64_t block, const KvSpan& next, const Partial& out, int worker) const {
    AttentionArgs args{};
    args.q = layer_.in() + (run.first_row + first) * layer_.in_width() + shape_.q_offset +
             head * shape_.group() * shape_.head_dim;
    args.q_stride = layer_.in_width();
    args.queries = count;
    args.group = shape_.group();
    args.head_dim = shape_.head_dim;
    args.first_query = run.first_position + first;
    args.first_key = block * layer_.kv().spec.page_tokens;
    args.window = shape_.window;
    args.scale = shape_.scale;
    args.softcap = shape_.softcap;
    args.span = span(run, head, first, count, block);
    args.next = next;
    args.m = out.m;
    args.s = out.s;
    args.o = out.o;
    layer_.add_bias(head, block, &args);
    args.scratch = scratch_[static_cast<size_t>(worker)] + kernel_scratch_offset_;
    kernels_.attention[static_cast<int>(layer_.kv().spec.dtype)](args);
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
      const KvSpan next =
          block + 1 < here.end ? span(run, head, first, count, block + 1) : KvSpan{};
      attend_page(run, head, first, count, block, next, fresh ? total : page, worker);
      if constexpr (kParts == Parts::kEachPage) {
        deliver(run, head, first, count, fresh ? total : page);
      } else if (!fresh) {
        merge(total, page, rows);
      }
    }
    if constexpr (kParts == Parts::kTotal) deliver(run, head, first, count, total);
  }

  // A (run, KV head, page) of a step in which every run has one token.
  struct DecodePiece {
    const SequenceRun& run;
    int64_t head;
    int64_t block;
    bool first, last;  // of those of its run and head
  };
  int64_t decode_pieces(const StepView& step) const {
    int64_t pieces = 0;
    for (const SequenceRun& run : step.runs) pieces += blocks(run, 0, 1).count() * shape_.kv_heads;
    return pieces;
  }
  DecodePiece decode_piece(const StepView& step, int64_t item) const {
    size_t r = 0;
    Blocks here = blocks(step.runs[0], 0, 1);
    while (item >= here.count() * shape_.kv_heads) {
      item -= here.count() * shape_.kv_heads;
      here = blocks(step.runs[++r], 0, 1);
    }
    const int64_t block = item % here.count();
    return {step.runs[r], item / here.count(), here.begin + block, block == 0,
            block + 1 == here.count()};
  }

  // The partial of a piece of a step in which every run has one token. Where pieces were merged or
  // handed out at once, the sum of the first of them says how many, below zero: no sum is.
  Partial decode_partial(int64_t item) const {
    return Partial::at(partials_ + item * partial_floats_, group_);
  }

  // Every run has one token: pieces of (run, KV head, page), so that one long sequence occupies all
  // members. Who has the first page of a (run, KV head) merges what follows at once, as far as it
  // has that too; the rest is merged after all pieces.
  template <typename Deliver>
  void attend_decode(const StepView& step, Team& team, const Deliver& deliver) const {
    const int64_t items = decode_pieces(step);
    const Team::Part own = team.part(items);
    const Partial page =
        Partial::at(reinterpret_cast<float*>(scratch_[static_cast<size_t>(team.worker())]), group_);
    int64_t first = 0, next = -1;  // of the pieces that this member merges at once
    team.parallel_for(items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const DecodePiece piece = decode_piece(step, item);
        KvSpan after{};
        if (item >= own.begin && item + 1 < own.end) {
          const DecodePiece later = decode_piece(step, item + 1);
          after = span(later.run, later.head, 0, 1, later.block);
        }
        if (piece.first) first = next = item;
        const bool goes_on = item == next;
        if (goes_on) next = piece.last ? -1 : item + 1;
        // The total is where the first piece is.
        const bool now = goes_on && (kParts == Parts::kEachPage || !piece.first);
        attend_page(piece.run, piece.head, 0, 1, piece.block, after,
                    now ? page : decode_partial(item), team.worker());
        if (!now) continue;
        if constexpr (kParts == Parts::kTotal) {
          merge(decode_partial(first), page, group_);
        } else {
          deliver(piece.run, piece.head, 0, 1, page);
        }
        const int64_t begun = kParts == Parts::kTotal ? first + 1 : first;
        decode_partial(begun).s[0] = static_cast<float>(begun - item - 1);
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
    const auto r = static_cast<size_t>(item / shape_.kv_heads);
    const int64_t head = item % shape_.kv_heads;
    int64_t first = 0;
    for (size_t i = 0; i < r; ++i) first += blocks(step.runs[i], 0, 1).count() * shape_.kv_heads;
    const SequenceRun& run = step.runs[r];
    const int64_t count = blocks(run, 0, 1).count();
    if (count == 0) return;
    first += head * count;
    for (int64_t i = first; i < first + count; ++i) {
      const Partial page = decode_partial(i);
      if (page.s[0] < 0) {
        i -= static_cast<int64_t>(page.s[0]) + 1;
      } else if constexpr (kParts == Parts::kEachPage) {
        deliver(run, head, 0, 1, page);
      } else if (i > first) {
        merge(decode_partial(first), page, group_);
      }
    }
    if constexpr (kParts == Parts::kTotal) deliver(run, head, 0, 1, decode_partial(first));
  }

  AttentionShape shape_;
  int64_t group_, partial_floats_;  // of it, and of a (run, KV head, page)
  KvLayer layer_;
  const KernelTable& kernels_;
  const std::vector<std::byte*>& scratch_;
  float* partials_;                // [runs * kv_heads * blocks] partials of one decode step
  int64_t kernel_scratch_offset_;  // the kernel's scratch begins after this worker's partials
};

}  // namespace helm::cpu
