// Partial attention of one KV head over one span, blocked over keys with a running maximum.
//
// Key blocks lie at fixed offsets from the span's start, scores sum in one order and outputs take
// keys in order, so a (query, head) has the same bits for every number of queries. Of i8, the keys'
// scales multiply finished scores and the values' scales the weights: both products see integers. A
// row (query i, head g) is numbered i * group + g, its place in m, s and o.
#pragma once

#include "cpu/kernels/attention_tiles.h"
#include "cpu/kernels/matmul.h"

namespace helm::cpu {
namespace {

inline constexpr int64_t kRowTile = 96;  // rows that share one widened K and V block

// Up to so many rows K and V are read as stored: all of them where conversions are quick.
template <class V>
inline constexpr int64_t kDirectRows = V::kWidenPanels ? 16 : kRowTile;

template <class V>
int64_t padded_dim(int64_t head_dim) {
  return round_up(head_dim, V::kLanes);
}

// Scratch of one call, carved from AttentionArgs::scratch.
struct AttentionScratch {
  float* q;        // direct: [rows, head_dim]; panel: tiles of kTileTokens rows, packed
  float* scores;   // [kRowTile, kKeyBlock]
  float* correct;  // [kRowTile] factor for what o holds
  float* k;        // [kKeyBlock / 4][steps][4][lanes]
  float* v;        // [kKeyBlock, padded head_dim]
};

template <class V>
int64_t carve(float* base, int64_t head_dim, AttentionScratch* out) {
  const int64_t dim = padded_dim<V>(head_dim);
  out->q = base;
  out->scores = out->q + kRowTile * dim;
  out->correct = out->scores + kRowTile * kKeyBlock;
  out->k = out->correct + round_up(kRowTile, 16);
  out->v = out->k + kKeyBlock * dim;
  return static_cast<int64_t>(sizeof(float)) *
         (round_up(kRowTile, 16) + kRowTile * (dim + kKeyBlock) + 2 * kKeyBlock * dim);
}

template <class V>
int64_t attention_scratch_bytes(int64_t head_dim) {
  AttentionScratch unused;
  return carve<V>(nullptr, head_dim, &unused);
}

// Keys [first, first + count) of a span.
struct KeyBlock {
  const void* k;         // [count, head_dim]
  const void* v;         // [count, head_dim]
  const float* k_scale;  // [count] or null
  const float* v_scale;  // [count] or null
  int64_t first;
  int64_t count;
};

// How many of a block's keys, from its first, some row of [row0, row0 + end) sees.
struct SeenKeys {
  const AttentionArgs& a;
  int64_t row0;
  const KeyBlock& block;

  int64_t operator()(int64_t end) const {
    const int64_t last = a.first_query + (row0 + end - 1) / a.group - a.first_key - block.first;
    return max_of(0, min_of(block.count, last + 1));
  }
};

template <class V, DType D>
KeyBlock key_block(const KvSpan& span, int64_t first, int64_t end, int64_t head_dim) {
  using Store = typename Elem<V, D>::Store;
  if (span.k == nullptr) return {};
  const bool scaled = span.k_scale != nullptr;
  return {static_cast<const Store*>(span.k) + first * head_dim,
          static_cast<const Store*>(span.v) + first * head_dim,
          scaled ? span.k_scale + first : nullptr,
          scaled ? span.v_scale + first : nullptr,
          first,
          min_of(kKeyBlock, end - first)};
}

// x(j) *= scale(j)
template <class V>
HELM_INLINE void scale_row(float* x, const float* scale, int64_t keys) {
  for_vectors<V>(keys, [&](int64_t j, auto load, auto store) HELM_LAMBDA_INLINE {
    store(x + j, V::mul(load(x + j), load(scale + j)));
  });
}

// Turns one row of scores into exp(score - max), zero outside [begin, end), and moves the row's
// running maximum and sum. Returns the factor for the row's output so far.
template <class V>
float softmax_row(float* x, int64_t keys, int64_t begin, int64_t end, float* m, float* s) {
  using F = typename V::F;
  constexpr float kNone = -__builtin_inff();
  const int64_t padded = round_up(keys, V::kLanes);
  F top = V::set1(kNone);
  if (begin < end) {
    for (int64_t j = 0; j < begin; ++j) x[j] = kNone;
    for (int64_t j = end; j < padded; ++j) x[j] = kNone;
    for (int64_t j = 0; j < padded; j += V::kLanes) top = V::max(top, V::load(x + j));
  }
  const float block_max = V::max_lane(top);
  if (block_max == kNone) {
    for (int64_t j = 0; j < padded; ++j) x[j] = 0.0f;
    return 1.0f;
  }
  const float max = block_max > *m ? block_max : *m;
  const F shift = V::set1(max);
  F sum = V::zero();
  for (int64_t j = 0; j < padded; j += V::kLanes) {
    const F e = exp<V>(V::sub(V::load(x + j), shift));
    V::store(x + j, e);
    sum = V::add(sum, e);
  }
  float correct = 1.0f;
  if (max != *m) V::store_n(&correct, exp<V>(V::set1(*m - max)), 1);
  *s = *s * correct + V::sum(sum);
  *m = max;
  return correct;
}

// Scores become weights, scaled by what the keys' and values' elements count.
template <class V, DType D>
void softmax_rows(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                  int64_t rows, const KeyBlock& block) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    float* x = scratch.scores + r * kKeyBlock;
    // Last visible key of this row, relative to the block.
    const int64_t last = a.first_query + row / a.group - a.first_key - block.first;
    const int64_t end = min_of(block.count, last + 1);
    const int64_t begin = a.window > 0 ? max_of(0, last - a.window + 1) : 0;
    if constexpr (D == DType::kI8) scale_row<V>(x, block.k_scale, block.count);
    scratch.correct[r] = softmax_row<V>(x, block.count, begin, end, a.m + row, a.s + row);
    if constexpr (D == DType::kI8) scale_row<V>(x, block.v_scale, block.count);
  }
}

template <class V, DType D>
void block_direct(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                  int64_t rows, const KeyBlock& now, const KeyBlock& next) {
  using Store = typename Elem<V, D>::Store;
  const SeenKeys seen{a, row0, now};
  score_block<Dot<V, D>>({scratch.q, a.head_dim}, rows, a.head_dim,
                         static_cast<const Store*>(now.k), seen, scratch.scores,
                         distance(next.k, now.k));
  softmax_rows<V, D>(a, scratch, row0, rows, now);
  output<V, D>(scratch.scores, scratch.correct, rows, seen, static_cast<const Store*>(now.v),
               a.head_dim, a.o + row0 * a.head_dim, a.head_dim, distance(next.v, now.v));
}

template <class V, DType D>
void block_panel(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                 int64_t rows, const KeyBlock& block) {
  using Store = typename Elem<V, D>::Store;
  const int64_t dim = padded_dim<V>(a.head_dim), keys = block.count;
  const int64_t steps = dim / V::kLanes;
  const Store* k = static_cast<const Store*>(block.k);
  const Store* v = static_cast<const Store*>(block.v);
  for (int64_t j = 0; j < keys; j += kQuad) {
    pack_quad<V, D>(k + j * a.head_dim, a.head_dim, keys - j, a.head_dim, scratch.k + j * dim);
  }
  __builtin_memset(scratch.scores, 0, static_cast<size_t>(rows * kKeyBlock) * sizeof(float));
  const SeenKeys seen{a, row0, block};
  for (int64_t r = 0; r < rows; r += V::kTileTokens) {
    const int64_t tile = min_of(V::kTileTokens, rows - r);
    const int64_t seen_keys = seen(r + tile);
    if (seen_keys == 0) continue;
    sweep_panel<V>(scratch.q + r * dim, tile, scratch.k, seen_keys, steps,
                   scratch.scores + r * kKeyBlock, kKeyBlock);
  }
  softmax_rows<V, D>(a, scratch, row0, rows, block);
  for (int64_t j = 0; j < keys; ++j) {
    pack_token<V, D>(v + j * a.head_dim, 1, a.head_dim, scratch.v + j * dim);
  }
  output<V, DType::kF32>(scratch.scores, scratch.correct, rows, seen, scratch.v, dim,
                         a.o + row0 * a.head_dim, a.head_dim, 0);
}

template <class V>
void clear_rows(const AttentionArgs& a, int64_t row0, int64_t rows) {
  for (int64_t r = row0; r < row0 + rows; ++r) a.m[r] = -__builtin_inff();
  __builtin_memset(a.s + row0, 0, static_cast<size_t>(rows) * sizeof(float));
  __builtin_memset(a.o + row0 * a.head_dim, 0,
                   static_cast<size_t>(rows * a.head_dim) * sizeof(float));
}

// scale * Q of a tile: rows one after the other for the direct path, packed tiles otherwise.
template <class V>
void load_queries(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                  int64_t rows, bool direct) {
  const int64_t dim = padded_dim<V>(a.head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    const float* q = a.q + row / a.group * a.q_stride + row % a.group * a.head_dim;
    float* scaled = direct ? scratch.q + r * a.head_dim : scratch.scores;
    for_vectors<V>(a.head_dim, [&](int64_t d, auto load, auto store) HELM_LAMBDA_INLINE {
      store(scaled + d, V::mul(load(q + d), V::set1(a.scale)));
    });
    if (direct) continue;
    const int64_t tile = r / V::kTileTokens * V::kTileTokens;
    pack_token<V, DType::kF32>(scaled, min_of(V::kTileTokens, rows - tile), a.head_dim,
                               scratch.q + tile * dim + (r - tile) * V::kLanes);
  }
}

// Tiles of rows, each with the blocks of keys in order: load(row0, rows), then block(row0, rows,
// now, next) for each, `next` being the keys after `now`, of this span or the next.
template <class V, DType D, class Load, class Block>
HELM_INLINE void each_block(const AttentionArgs& a, Load load, Block block) {
  const int64_t total = a.queries * a.group;
  for (int64_t row0 = 0; row0 < total; row0 += kRowTile) {
    const int64_t rows = min_of(kRowTile, total - row0);
    clear_rows<V>(a, row0, rows);
    load(row0, rows);
    // Keys that some row of the tile sees; blocks outside are never touched.
    const int64_t first = a.first_query + row0 / a.group - a.first_key;
    const int64_t last = a.first_query + (row0 + rows - 1) / a.group - a.first_key;
    const int64_t end = min_of(a.span.count, last + 1);
    const int64_t begin = a.window > 0 ? max_of(0, first - a.window + 1) : 0;
    for (int64_t j = begin / kKeyBlock * kKeyBlock; j < end; j += kKeyBlock) {
      const bool more = j + kKeyBlock < end;
      block(row0, rows, key_block<V, D>(a.span, j, end, a.head_dim),
            more ? key_block<V, D>(a.span, j + kKeyBlock, end, a.head_dim)
                 : key_block<V, D>(a.next, 0, a.next.count, a.head_dim));
    }
  }
}

template <class V, DType D>
void attention(const AttentionArgs& a) {
  AttentionScratch scratch;
  carve<V>(static_cast<float*>(a.scratch), a.head_dim, &scratch);
  const bool direct = min_of(a.queries * a.group, kRowTile) <= kDirectRows<V>;
  each_block<V, D>(
      a, [&](int64_t row0, int64_t rows) { load_queries<V>(a, scratch, row0, rows, direct); },
      [&](int64_t row0, int64_t rows, const KeyBlock& now, const KeyBlock& next) {
        if (direct) {
          block_direct<V, D>(a, scratch, row0, rows, now, next);
        } else {
          block_panel<V, D>(a, scratch, row0, rows, now);
        }
      });
}

}  // namespace
}  // namespace helm::cpu
