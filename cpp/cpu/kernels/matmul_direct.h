// Matrix products of few tokens, straight from the weights: bound by reading them. The order of the
// sums is that of matmul.h.
#pragma once

#include "cpu/kernels/dot.h"
#include "cpu/kernels/kernels.h"

namespace helm::cpu {
namespace {

inline constexpr int kQuad = 4;  // sums reduced together

template <int N>
struct Count {
  static constexpr int value = N;
};

// In each row's stream a line far ahead is fetched to L2 and one close by from there to L1: fetched
// to L1 at once, lines that arrive early would be pushed out again by the inputs of several tokens,
// and requests of memory would fill the buffers that those inputs need when they come from L2.
inline constexpr int64_t kFarBytes = 1536;
inline constexpr int64_t kNearBytes = 3 * kLineBytes;

// What a tile asks of memory for later: in each row's stream the line at `far` bytes, which moves
// on by `step` bytes with every line computed.
struct Prefetch {
  int64_t far;
  int64_t step;
};

// C(t, r) = [C(t, r)] + [bias(r)] for the given rows: where the sum over k starts.
HELM_INLINE float start_value(const MatmulArgs& m, int64_t t, int64_t r) {
  const float c = m.accumulate ? m.c[t * m.c_stride + r] : 0.0f;
  return m.bias ? c + m.bias[r] : c;
}

// R rows, row_step apart, times T tokens. The R streams are far apart in memory, so each is
// sequential and is prefetched on its own (adjacent rows measured a fifth to two fifths slower).
template <class P, int R, int T>
void direct_tile(const MatmulArgs& m, int64_t row, int64_t row_step, int64_t token,
                 Prefetch prefetch) {
  using V = typename P::V;
  using Store = typename P::Store;
  using F = typename V::F;
  constexpr int kSums = (R * T + kQuad - 1) / kQuad * kQuad;
  const Store* w = static_cast<const Store*>(m.w) + row * m.cols;
  const int64_t w_step = row_step * m.cols;
  using Input = typename P::Input;
  const Input* a = reinterpret_cast<const Input*>(m.a) + token * m.a_stride;
  float c[kSums] = {};
  if (m.accumulate || m.bias) {
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) c[r * T + t] = start_value(m, token + t, row + r * row_step);
    }
  }
  for (int64_t k0 = 0; k0 < m.cols; k0 += P::kBlock) {
    const int64_t k1 = min_of(m.cols, k0 + P::kBlock);
    F acc[kSums];
    HELM_UNROLL
    for (int i = 0; i < kSums; ++i) acc[i] = V::zero();
    const auto step = [&](auto load_w, auto load_a, int64_t k) HELM_LAMBDA_INLINE {
      if constexpr (R <= T) {
        typename P::W x[R];
        HELM_UNROLL
        for (int r = 0; r < R; ++r) x[r] = load_w(w + r * w_step + k);
        HELM_UNROLL
        for (int t = 0; t < T; ++t) {
          const typename P::A y = load_a(a + t * m.a_stride + k);
          HELM_UNROLL
          for (int r = 0; r < R; ++r) acc[r * T + t] = P::fma(x[r], y, acc[r * T + t]);
        }
      } else {
        typename P::A y[T];
        HELM_UNROLL
        for (int t = 0; t < T; ++t) y[t] = load_a(a + t * m.a_stride + k);
        HELM_UNROLL
        for (int r = 0; r < R; ++r) {
          const typename P::W x = load_w(w + r * w_step + k);
          HELM_UNROLL
          for (int t = 0; t < T; ++t) acc[r * T + t] = P::fma(x, y[t], acc[r * T + t]);
        }
      }
    };
    const auto load_w = [](const Store* p) HELM_LAMBDA_INLINE { return P::load_w(p); };
    const auto load_a = [](const Input* p) HELM_LAMBDA_INLINE { return P::load_a(p); };
    constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(Store));  // elements
    constexpr int kSteps = kLine / P::kStep > 0 ? kLine / P::kStep : 1;
    int64_t k = k0;
    for (; k + kSteps * P::kStep <= k1; k += kSteps * P::kStep) {
      HELM_UNROLL
      for (int r = 0; r < R; ++r) {
        const Store* row_of_w = w + r * w_step;
        __builtin_prefetch(reinterpret_cast<const char*>(row_of_w) + prefetch.far, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(row_of_w + k) + kNearBytes);
      }
      prefetch.far += prefetch.step;
      HELM_UNROLL
      for (int s = 0; s < kSteps; ++s) step(load_w, load_a, k + s * P::kStep);
    }
    for (; k + P::kStep <= k1; k += P::kStep) step(load_w, load_a, k);
    if (k < k1) {
      const int64_t n = k1 - k;
      step([n](const Store* p) HELM_LAMBDA_INLINE { return P::load_w_n(p, n); },
           [n](const Input* p) HELM_LAMBDA_INLINE { return P::load_a_n(p, n); }, k);
    }
    float sums[kSums];
    V::template reduce<kSums>(acc, sums);
    for (int i = 0; i < kSums; ++i) c[i] += sums[i];
  }
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    float* out = m.c + (token + t) * m.c_stride + row;
    HELM_UNROLL
    for (int r = 0; r < R; ++r) out[r * row_step] = c[r * T + t];
  }
}

// All tokens in tiles of C or C - 1, one group of rows after the other: a group's weights come from
// memory for the first tile and from cache for the others. Of several tiles each asks for its share
// of the next group, so that memory is busy during all of them.
template <class P, int C>
void direct_rows(const MatmulArgs& m, int64_t tiles) {
  constexpr int kRows = P::V::kRowsPerTokens[C];
  const int64_t row_bytes = m.cols * static_cast<int64_t>(sizeof(typename P::Store));
  const int64_t far = tiles == 1 ? kFarBytes : row_bytes;
  const int64_t full = m.tokens - tiles * (C - 1);  // tiles of C tokens, they come first
  const int64_t step = m.rows / kRows;
  const auto group = [&](auto rows, int64_t row) HELM_LAMBDA_INLINE {
    constexpr int R = decltype(rows)::value;
    for (int64_t i = 0, t = 0; i < tiles; ++i) {
      const Prefetch prefetch{far + row_bytes * i / tiles, (kLineBytes + tiles - 1) / tiles};
      if (i < full) {
        direct_tile<P, R, C>(m, row, step, t, prefetch);
        t += C;
      } else if constexpr (C > 1) {
        direct_tile<P, R, C - 1>(m, row, step, t, prefetch);
        t += C - 1;
      }
    }
  };
  for (int64_t i = 0; i < step; ++i) group(Count<kRows>{}, i);
  for (int64_t r = step * kRows; r < m.rows; ++r) group(Count<1>{}, r);
}

// Needs no scratch. Tokens are cut into tiles as even as possible.
template <class P>
void direct_product(const MatmulArgs& m) {
  constexpr int kMax = P::V::kDirectTile;
  const int64_t tiles = (m.tokens + kMax - 1) / kMax;
  switch ((m.tokens + tiles - 1) / tiles) {
    case 1:
      return direct_rows<P, 1>(m, tiles);
    case 2:
      return direct_rows<P, 2>(m, tiles);
    case 3:
      if constexpr (kMax >= 3) return direct_rows<P, 3>(m, tiles);
      break;
    case 4:
      if constexpr (kMax >= 4) return direct_rows<P, 4>(m, tiles);
      break;
    case 5:
      if constexpr (kMax >= 5) return direct_rows<P, 5>(m, tiles);
      break;
    case 6:
      if constexpr (kMax >= 6) return direct_rows<P, 6>(m, tiles);
      break;
  }
}

}  // namespace
}  // namespace helm::cpu
