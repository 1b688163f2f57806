// Attention over bf16 keys and values in products of bf16 pairs (AVX512-BF16): queries and weights
// are rounded to bf16, nearest even; products, sums, maxima and the weights' sum are f32. K and V
// are read as stored for every number of queries. Masks, softmax and blocks are attention.h's.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/dot_avx512bf16.h"

namespace helm::cpu {
namespace {

// Elements of head_dim that two accumulators hold.
inline constexpr int64_t kPairDims = 2 * VecAvx512::kLanes;

// Sums of two keys at a time, of kPairDims elements of head_dim. Interleaving two rows of V leaves
// quarters of them in `low` and quarters in `high`; memory has them in order.
struct PairSums {
  using V = VecAvx512;
  using F = V::F;
  F low, high;

  // n: elements that exist, any number for the last.
  HELM_INLINE static PairSums load(const float* o, int64_t n, F factor) {
    const F first = V::load_n(o, min_of(n, V::kLanes));
    const F second = n > V::kLanes ? V::load_n(o + V::kLanes, n - V::kLanes) : V::zero();
    return {V::mul(_mm512_shuffle_f32x4(first, second, 0x88), factor),
            V::mul(_mm512_shuffle_f32x4(first, second, 0xdd), factor)};
  }
  HELM_INLINE void store(float* o, int64_t n) const {
    constexpr int kSwapMiddle = 0xd8;
    const F first = _mm512_shuffle_f32x4(low, high, 0x44);
    const F second = _mm512_shuffle_f32x4(low, high, 0xee);
    V::store_n(o, _mm512_shuffle_f32x4(first, first, kSwapMiddle), min_of(n, V::kLanes));
    if (n <= V::kLanes) return;
    V::store_n(o + V::kLanes, _mm512_shuffle_f32x4(second, second, kSwapMiddle), n - V::kLanes);
  }
};

HELM_INLINE __m512i load_values(const uint16_t* v, int64_t n) {
  if (n >= kPairDims) return _mm512_loadu_si512(v);
  return _mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, v);
}

// o(r, d) = o(r, d) * correct(r) + sum_j p(r, j) * V(j, d)    for R rows and C chunks of kPairDims
// elements, or one of `dims`. Rows of weights are kKeyBlock floats apart.
template <int R, int C>
HELM_INLINE void output_pairs(const uint16_t* p, const float* correct, int64_t keys,
                              const uint16_t* v, int64_t head_dim, int64_t dims, float* o,
                              BlockAhead ahead) {
  using V = VecAvx512;
  constexpr int64_t kRow = 2 * kKeyBlock;          // of weights, in bf16
  const int64_t left = C == 1 ? dims : kPairDims;  // in each chunk
  PairSums acc[R][C];
  HELM_UNROLL
  for (int r = 0; r < R; ++r) {
    HELM_UNROLL
    for (int c = 0; c < C; ++c) {
      acc[r][c] = PairSums::load(o + r * head_dim + c * kPairDims, left, V::set1(correct[r]));
    }
  }
  const uint16_t* end = v + keys * head_dim;
  const auto step = [&](const uint16_t* first, const uint16_t* second,
                        int64_t j) HELM_LAMBDA_INLINE {
    __m512bh low[C], high[C];
    HELM_UNROLL
    for (int c = 0; c < C; ++c) {
      if (ahead.first) {
        const int64_t near = 4 * head_dim * int64_t{sizeof(*v)};
        ahead.fetch<kLineBytes>(first + c * kPairDims, near, end);
        ahead.fetch<kLineBytes>(first + c * kPairDims + head_dim, near, end);
      }
      const __m512i x = load_values(first + c * kPairDims, left);
      const __m512i y = second ? load_values(second + c * kPairDims, left) : _mm512_setzero_si512();
      low[c] = (__m512bh)_mm512_unpacklo_epi16(x, y);
      high[c] = (__m512bh)_mm512_unpackhi_epi16(x, y);
    }
    HELM_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, p + r * kRow + j, sizeof(pair));
      const auto weights = (__m512bh)_mm512_set1_epi32(pair);
      HELM_UNROLL
      for (int c = 0; c < C; ++c) {
        acc[r][c].low = _mm512_dpbf16_ps(acc[r][c].low, low[c], weights);
        acc[r][c].high = _mm512_dpbf16_ps(acc[r][c].high, high[c], weights);
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2, v += 2 * head_dim) step(v, v + head_dim, j);
  if (j < keys) step(v, nullptr, j);
  HELM_UNROLL
  for (int r = 0; r < R; ++r) {
    HELM_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c].store(o + r * head_dim + c * kPairDims, left);
  }
}

template <int R>
void output_pair_rows(const uint16_t* p, const float* correct, int64_t keys, const uint16_t* v,
                      int64_t head_dim, float* o, BlockAhead ahead) {
  constexpr int C = VecAvx512::kOutputVectors[R] / 2;
  int64_t d = 0;
  for (; d + C * kPairDims <= head_dim; d += C * kPairDims) {
    output_pairs<R, C>(p, correct, keys, v + d, head_dim, C * kPairDims, o + d, ahead);
  }
  for (; d < head_dim; d += kPairDims) {
    output_pairs<R, 1>(p, correct, keys, v + d, head_dim, min_of(kPairDims, head_dim - d), o + d,
                       ahead);
  }
}

// seen: as score_block's.
template <class Seen>
void output_bf16(const uint16_t* p, const float* correct, int64_t rows, Seen seen,
                 const uint16_t* v, int64_t head_dim, float* o, BlockAhead ahead) {
  for (int64_t r = 0; r < rows; r += kPvRows, ahead = {}) {
    const int64_t keys = seen(min_of(rows, r + kPvRows));
    const uint16_t* pr = p + r * 2 * kKeyBlock;
    float* out = o + r * head_dim;
    switch (min_of(kPvRows, rows - r)) {
#define HELM_ROWS(n)                                                     \
  case n:                                                                \
    output_pair_rows<n>(pr, correct + r, keys, v, head_dim, out, ahead); \
    break;
      HELM_ROWS(1) HELM_ROWS(2) HELM_ROWS(3) HELM_ROWS(4) HELM_ROWS(5) HELM_ROWS(6)
#undef HELM_ROWS
    }
  }
}

// Each row of weights becomes bf16 at the beginning of where it lies.
inline void round_weights(float* weights, int64_t rows, int64_t keys) {
  for (int64_t r = 0; r < rows; ++r, weights += kKeyBlock) {
    round_row(weights, keys, reinterpret_cast<uint16_t*>(weights));
  }
}

// scale * Q of a tile's rows, rounded, `stride` apart and padded with zeros; one: [head_dim].
inline void round_queries(const AttentionArgs& a, float* one, uint16_t* rounded, int64_t stride,
                          int64_t row0, int64_t rows) {
  for (int64_t row = row0; row < row0 + rows; ++row, rounded += stride) {
    load_queries<VecAvx512>(a, one, a.head_dim, row, 1);
    round_row(one, a.head_dim, rounded);
  }
}

inline void attention_bf16(const AttentionArgs& a) {
  using V = VecAvx512;
  constexpr DType kKv = DType::kBF16;
  AttentionScratch scratch;
  carve<V>(static_cast<float*>(a.scratch), a.head_dim, &scratch);
  auto* queries = reinterpret_cast<uint16_t*>(scratch.q);
  auto* weights = reinterpret_cast<uint16_t*>(scratch.scores);
  const int64_t stride = round_up(a.head_dim, DotBf16::kStep);
  each_block<V, kKv>(
      a,
      [&](int64_t row0, int64_t rows) {
        round_queries(a, scratch.scores, queries, stride, row0, rows);
      },
      [&](int64_t row0, int64_t rows, const KeyBlock& now, const KeyBlock& next) {
        const SeenKeys seen{a, row0, now};
        score_block<DotRounded>({queries, stride}, rows, a.head_dim,
                                static_cast<const uint16_t*>(now.k), seen, scratch.scores,
                                ahead_of<V>(now.k, now.v, next.k, next.bytes));
        softmax_rows<V, kKv>(a, scratch, row0, rows, now);
        round_weights(scratch.scores, rows, now.count);
        output_bf16(weights, scratch.correct, rows, seen, static_cast<const uint16_t*>(now.v),
                    a.head_dim, a.o + row0 * a.head_dim,
                    ahead_of<V>(now.v, next.k, next.v, next.bytes));
      });
}

}  // namespace
}  // namespace helm::cpu
