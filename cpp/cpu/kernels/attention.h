// Partial attention of one KV head over one span, blocked over keys with a running maximum.
//
// Key blocks lie at fixed offsets from the span's start, scores sum in one order and outputs take
// keys in order, so a (query, head) has the same bits for every number of queries. Of i8, the keys'
// scales multiply finished scores and the values' scales the weights: both products see integers. A
// row (query i, head g) is numbered i * group + g, its place in m, s and o.
#pragma once

#include <type_traits>

#include "cpu/kernels/attention_tiles.h"
#include "cpu/kernels/matmul.h"

namespace helm::cpu {
namespace {

inline constexpr int64_t kRowTile = 96;  // rows that share a block of K and V while it is in cache
inline constexpr int64_t kBiasTile = kRowTile / 3;  // where the keys lack a bias: scratch for three

// Scratch of one call, carved from AttentionArgs::scratch.
struct AttentionScratch {
  float* q;        // [rows, head_dim], or as much in a narrower dtype, padded
  float* scores;   // [kRowTile, kKeyBlock]
  float* correct;  // [kRowTile] factor for what o holds
};

template <class V>
int64_t carve(float* base, int64_t head_dim, AttentionScratch* out) {
  const int64_t dim = round_up(head_dim, 2 * V::kLanes);
  out->q = base;
  out->scores = out->q + kRowTile * dim;
  out->correct = out->scores + kRowTile * kKeyBlock;
  return static_cast<int64_t>(sizeof(float)) *
         (round_up(kRowTile, 16) + kRowTile * (dim + kKeyBlock));
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
  int64_t bytes;  // of K, as of V
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
  const int64_t count = min_of(kKeyBlock, end - first);
  return {static_cast<const Store*>(span.k) + first * head_dim,
          static_cast<const Store*>(span.v) + first * head_dim,
          scaled ? span.k_scale + first : nullptr,
          scaled ? span.v_scale + first : nullptr,
          first,
          count,
          count * head_dim * static_cast<int64_t>(sizeof(Store))};
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

// x(j) = x(j) * scale(j) + more(j)
template <class V>
HELM_INLINE void scale_and_add_row(float* x, const float* scale, const float* more, int64_t keys) {
  for_vectors<V>(keys, [&](int64_t j, auto load, auto store) HELM_LAMBDA_INLINE {
    store(x + j, V::fma(load(x + j), load(scale + j), load(more + j)));
  });
}

// Scores become weights, scaled by what the keys' and values' elements count. more: null, or what
// finished scores get, [rows, kKeyBlock].
template <class V, DType D>
void softmax_rows(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                  int64_t rows, const KeyBlock& block, const float* more = nullptr) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    float* x = scratch.scores + r * kKeyBlock;
    // Last visible key of this row, relative to the block.
    const int64_t last = a.first_query + row / a.group - a.first_key - block.first;
    const int64_t end = min_of(block.count, last + 1);
    const int64_t begin = a.window > 0 ? max_of(0, last - a.window + 1) : 0;
    if constexpr (D == DType::kI8) {
      if (more == nullptr) {
        scale_row<V>(x, block.k_scale, block.count);
      } else {
        scale_and_add_row<V>(x, block.k_scale, more + r * kKeyBlock, block.count);
      }
    }
    if (a.softcap > 0) {
      for_vectors<V>(block.count, [&](int64_t j, auto load, auto store) HELM_LAMBDA_INLINE {
        store(x + j, softcap<V>(load(x + j), a.softcap));
      });
    }
    scratch.correct[r] = softmax_row<V>(x, block.count, begin, end, a.m + row, a.s + row);
    if constexpr (D == DType::kI8) scale_row<V>(x, block.v_scale, block.count);
  }
}

inline void clear_rows(const AttentionArgs& a, int64_t row0, int64_t rows) {
  for (int64_t r = row0; r < row0 + rows; ++r) a.m[r] = -__builtin_inff();
  __builtin_memset(a.s + row0, 0, static_cast<size_t>(rows) * sizeof(float));
  __builtin_memset(a.o + row0 * a.head_dim, 0,
                   static_cast<size_t>(rows * a.head_dim) * sizeof(float));
}

// scale * Q of a tile's rows, `stride` apart.
template <class V>
void load_queries(const AttentionArgs& a, float* out, int64_t stride, int64_t row0, int64_t rows) {
  for (int64_t row = row0; row < row0 + rows; ++row, out += stride) {
    const float* q = a.q + row / a.group * a.q_stride + row % a.group * a.head_dim;
    for_vectors<V>(a.head_dim, [&](int64_t d, auto load, auto store) HELM_LAMBDA_INLINE {
      store(out + d, V::mul(load(q + d), V::set1(a.scale)));
    });
  }
}

// Tiles of rows, each with the blocks of keys in order: load(row0, rows), then block(row0, rows,
// now, next) for each, `next` being the keys after `now`, of this span or the next.
template <class V, DType D, int64_t Tile = kRowTile, class Load, class Block>
HELM_INLINE void each_block(const AttentionArgs& a, Load load, Block block) {
  const int64_t total = a.queries * a.group;
  for (int64_t row0 = 0; row0 < total; row0 += Tile) {
    const int64_t rows = min_of(Tile, total - row0);
    clear_rows(a, row0, rows);
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

// A row of two halves as products of pairs (q1, q2), (b1, b2), so that with c, s of a position
// q . R b = sum c first + s second:
//   first = q1 b1 + q2 b2,   second = q2 b1 - q1 b2
// With c, s in the place of b1, b2 the same turns such a row on by that position.
template <class V>
HELM_INLINE void pair_products(const float* q, const float* b, int64_t half, float* out) {
  for_vectors<V>(half, [&](int64_t d, auto load, auto store) HELM_LAMBDA_INLINE {
    const typename V::F q1 = load(q + d), q2 = load(q + half + d);
    const typename V::F b1 = load(b + d), b2 = load(b + half + d);
    store(out + d, V::fma(q1, b1, V::mul(q2, b2)));
    store(out + half + d, V::sub(V::mul(q2, b1), V::mul(q1, b2)));
  });
}

// Attention to i8 keys that lack a bias: what that adds to scores are scores of turned queries
// against the turns of a block's places, which are the same for all blocks and stay in L2.
template <class V>
void attention_less_bias(const AttentionArgs& a) {
  constexpr DType D = DType::kI8;
  using Store = typename Elem<V, D>::Store;
  AttentionScratch scratch;
  carve<V>(static_cast<float*>(a.scratch), a.head_dim, &scratch);
  const int64_t stride = round_up(a.head_dim, V::kLanes), half = a.rotary / 2;
  float* pairs = scratch.q + kBiasTile * stride;  // [rows, rotary]
  float* turned = pairs + kBiasTile * stride;     // likewise
  float* more = scratch.scores + kBiasTile * kKeyBlock;
  each_block<V, D, kBiasTile>(
      a,
      [&](int64_t row0, int64_t rows) {
        load_queries<V>(a, scratch.q, stride, row0, rows);
        for (int64_t r = 0; r < rows; ++r) {
          pair_products<V>(scratch.q + r * stride, a.bias, half, pairs + r * stride);
        }
      },
      [&](int64_t row0, int64_t rows, const KeyBlock& now, const KeyBlock& next) {
        const SeenKeys seen{a, row0, now};
        const auto ahead = ahead_of<V>(now.k, now.v, next.k, next.bytes);
        score_block<Dot<V, D>>({scratch.q, stride}, rows, a.head_dim,
                               static_cast<const Store*>(now.k), seen, scratch.scores, ahead);
        const float* turns = a.block_turns + now.first / kKeyBlock * a.rotary;
        for (int64_t r = 0; r < rows; ++r) {
          pair_products<V>(pairs + r * stride, turns, half, turned + r * stride);
        }
        score_block<Dot<V, DType::kF32>>({turned, stride}, rows, a.rotary, a.place_turns, seen,
                                         more, decltype(ahead){});
        softmax_rows<V, D>(a, scratch, row0, rows, now, more);
        output<V, D>(scratch.scores, scratch.correct, rows, seen, static_cast<const Store*>(now.v),
                     a.head_dim, a.o + row0 * a.head_dim,
                     ahead_of<V>(now.v, next.k, next.v, next.bytes));
      });
}

template <class V, DType D>
void attention(const AttentionArgs& a) {
  if constexpr (D == DType::kI8) {
    if (a.bias != nullptr) return attention_less_bias<V>(a);
  }
  using Store = typename Elem<V, D>::Store;
  using P = std::conditional_t<kInPairs<V, D>, DotSplit<V>, Dot<V, D>>;
  AttentionScratch scratch;
  carve<V>(static_cast<float*>(a.scratch), a.head_dim, &scratch);
  const int64_t stride = round_up(a.head_dim, P::kStep);
  each_block<V, D>(
      a,
      [&](int64_t row0, int64_t rows) {
        load_queries<V>(a, scratch.q, stride, row0, rows);
        if constexpr (kInPairs<V, D>) {
          for (int64_t r = 0; r < rows; ++r) P::split_row(scratch.q + r * stride, a.head_dim);
        }
      },
      [&](int64_t row0, int64_t rows, const KeyBlock& now, const KeyBlock& next) {
        const SeenKeys seen{a, row0, now};
        score_block<P>({scratch.q, stride}, rows, a.head_dim, static_cast<const Store*>(now.k),
                       seen, scratch.scores, ahead_of<V>(now.k, now.v, next.k, next.bytes));
        softmax_rows<V, D>(a, scratch, row0, rows, now);
        output<V, D>(scratch.scores, scratch.correct, rows, seen, static_cast<const Store*>(now.v),
                     a.head_dim, a.o + row0 * a.head_dim,
                     ahead_of<V>(now.v, next.k, next.v, next.bytes));
      });
}

}  // namespace
}  // namespace helm::cpu
