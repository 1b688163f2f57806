// Matrix product of f32 activations with row-major weights, over any vector type.
//
// Both operands have k contiguous, so C(t, r) is a dot product along memory: vectors run along k
// and nothing is transposed. The order of the arithmetic is the same for every tile shape:
//   k is cut into blocks of V::kBlock; in a block one vector accumulator takes k in order; the
//   block's lanes are summed by V::reduce4; C starts as [C] + [bias] and takes the blocks in order.
// So C(t, r) has the same bits however tokens and rows are grouped.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

inline constexpr int kQuad = 4;  // rows reduced together
// Ahead in each stream. One token, bf16, six streams, one Zen 4 thread: 28 GB/s at 512, 22 at 1024,
// 20 at 2048. Probably lines lost from L1, as the streams often lie a power of two apart.
inline constexpr int64_t kPrefetchBytes = 512;

template <int N>
struct Count {
  static constexpr int value = N;
};

// C(t, r) = [C(t, r)] + [bias(r)] for the given rows: where the sum over k starts.
HELM_INLINE float start_value(const MatmulArgs& m, int64_t t, int64_t r) {
  const float c = m.accumulate ? m.c[t * m.c_stride + r] : 0.0f;
  return m.bias ? c + m.bias[r] : c;
}

// Few tokens: R rows, row_step apart, times T tokens straight from the weights. The R streams are
// far apart in memory, so each is sequential and is prefetched on its own (adjacent rows
// measured a fifth to two fifths slower).
template <class V, DType D, int R, int T>
void direct_tile(const MatmulArgs& m, int64_t row, int64_t row_step, int64_t token,
                 int64_t prefetch_bytes) {
  using E = Elem<V, D>;
  using Store = typename E::Store;
  using F = typename V::F;
  constexpr int kSums = (R * T + kQuad - 1) / kQuad * kQuad;
  const Store* w = static_cast<const Store*>(m.w) + row * m.cols;
  const int64_t w_step = row_step * m.cols;
  const float* a = m.a + token * m.a_stride;
  float c[kSums];
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) c[r * T + t] = start_value(m, token + t, row + r * row_step);
  }
  for (int64_t k0 = 0; k0 < m.cols; k0 += V::kBlock) {
    const int64_t k1 = min_of(m.cols, k0 + V::kBlock);
    F acc[kSums];
    HELM_UNROLL
    for (int i = 0; i < kSums; ++i) acc[i] = V::zero();
    const auto step = [&](auto load_w, auto load_a, int64_t k) HELM_LAMBDA_INLINE {
      if constexpr (R <= T) {
        F x[R];
        HELM_UNROLL
        for (int r = 0; r < R; ++r) x[r] = load_w(w + r * w_step + k);
        HELM_UNROLL
        for (int t = 0; t < T; ++t) {
          const F y = load_a(a + t * m.a_stride + k);
          HELM_UNROLL
          for (int r = 0; r < R; ++r) acc[r * T + t] = V::fma(x[r], y, acc[r * T + t]);
        }
      } else {
        F y[T];
        HELM_UNROLL
        for (int t = 0; t < T; ++t) y[t] = load_a(a + t * m.a_stride + k);
        HELM_UNROLL
        for (int r = 0; r < R; ++r) {
          const F x = load_w(w + r * w_step + k);
          HELM_UNROLL
          for (int t = 0; t < T; ++t) acc[r * T + t] = V::fma(x, y[t], acc[r * T + t]);
        }
      }
    };
    const auto load_w = [](const Store* p) HELM_LAMBDA_INLINE { return E::load(p); };
    const auto load_a = [](const float* p) HELM_LAMBDA_INLINE { return V::load(p); };
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Store));  // elements per cache line
    constexpr int kSteps = kLine / V::kLanes > 0 ? kLine / V::kLanes : 1;
    int64_t k = k0;
    for (; k + kSteps * V::kLanes <= k1; k += kSteps * V::kLanes) {
      HELM_UNROLL
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(reinterpret_cast<const char*>(w + r * w_step + k) + prefetch_bytes);
      }
      HELM_UNROLL
      for (int s = 0; s < kSteps; ++s) step(load_w, load_a, k + s * V::kLanes);
    }
    for (; k + V::kLanes <= k1; k += V::kLanes) step(load_w, load_a, k);
    if (k < k1) {
      const int64_t n = k1 - k;
      step([n](const Store* p) HELM_LAMBDA_INLINE { return E::load_n(p, n); },
           [n](const float* p) HELM_LAMBDA_INLINE { return V::load_n(p, n); }, k);
    }
    float sums[kSums];
    HELM_UNROLL
    for (int i = 0; i < kSums; i += kQuad) {
      V::reduce4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], sums + i);
    }
    for (int i = 0; i < R * T; ++i) c[i] += sums[i];
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) m.c[(token + t) * m.c_stride + row + r * row_step] = c[r * T + t];
  }
}

// All tokens in tiles of C or C - 1, one group of rows after the other: a group's weights come from
// memory for the first tile and from L1 for the others.
template <class V, DType D, int C>
void direct_rows(const MatmulArgs& m, int64_t tiles, int64_t prefetch_bytes) {
  constexpr int kRows = V::kRowsPerTokens[C];
  const int64_t full = m.tokens - tiles * (C - 1);  // tiles of C tokens, they come first
  const int64_t step = m.rows / kRows;
  const auto group = [&](auto rows, int64_t row) HELM_LAMBDA_INLINE {
    constexpr int R = decltype(rows)::value;
    int64_t ahead = prefetch_bytes;
    for (int64_t i = 0, t = 0; i < tiles; ++i) {
      if (i < full) {
        direct_tile<V, D, R, C>(m, row, step, t, ahead);
        t += C;
      } else if constexpr (C > 1) {
        direct_tile<V, D, R, C - 1>(m, row, step, t, ahead);
        t += C - 1;
      }
      ahead = 0;
    }
  };
  for (int64_t i = 0; i < step; ++i) group(Count<kRows>{}, i);
  for (int64_t r = step * kRows; r < m.rows; ++r) group(Count<1>{}, r);
}

// Needs no scratch. Tokens are cut into tiles as even as possible.
template <class V, DType D>
void matmul_direct(const MatmulArgs& m, int64_t prefetch_bytes) {
  constexpr int kMax = V::kDirectTile;
  const int64_t tiles = (m.tokens + kMax - 1) / kMax;
  switch ((m.tokens + tiles - 1) / tiles) {
    case 1:
      return direct_rows<V, D, 1>(m, tiles, prefetch_bytes);
    case 2:
      return direct_rows<V, D, 2>(m, tiles, prefetch_bytes);
    case 3:
      if constexpr (kMax >= 3) return direct_rows<V, D, 3>(m, tiles, prefetch_bytes);
      break;
    case 4:
      if constexpr (kMax >= 4) return direct_rows<V, D, 4>(m, tiles, prefetch_bytes);
      break;
    case 5:
      if constexpr (kMax >= 5) return direct_rows<V, D, 5>(m, tiles, prefetch_bytes);
      break;
    case 6:
      if constexpr (kMax >= 6) return direct_rows<V, D, 6>(m, tiles, prefetch_bytes);
      break;
  }
}

// Packs up to four rows of `cols` elements, `stride` apart, as [steps][4][lanes] f32 with zeros
// where there is no row or no column.
template <class V, DType D>
void pack_quad(const typename Elem<V, D>::Store* w, int64_t stride, int64_t rows, int64_t cols,
               float* out) {
  using E = Elem<V, D>;
  constexpr int64_t kStep = kQuad * V::kLanes;
  const int64_t whole = cols / V::kLanes;
  if (rows >= kQuad) {
    for (int64_t s = 0; s < whole; ++s) {
      HELM_UNROLL
      for (int r = 0; r < kQuad; ++r) {
        V::store(out + s * kStep + r * V::kLanes, E::load(w + r * stride + s * V::kLanes));
      }
    }
  } else {
    for (int64_t s = 0; s < whole; ++s) {
      for (int r = 0; r < kQuad; ++r) {
        V::store(out + s * kStep + r * V::kLanes,
                 r < rows ? E::load(w + r * stride + s * V::kLanes) : V::zero());
      }
    }
  }
  const int64_t tail = cols - whole * V::kLanes;
  if (tail == 0) return;
  for (int r = 0; r < kQuad; ++r) {
    V::store(out + whole * kStep + r * V::kLanes,
             r < rows ? E::load_n(w + r * stride + whole * V::kLanes, tail) : V::zero());
  }
}

// Packs one of the rows of a tile of `tokens` as [steps][tokens][lanes] f32, columns beyond zero.
template <class V, DType D>
HELM_INLINE void pack_token(const typename Elem<V, D>::Store* a, int64_t tokens, int64_t cols,
                            float* out) {
  using E = Elem<V, D>;
  const int64_t step = tokens * V::kLanes;
  int64_t k = 0;
  for (; k + V::kLanes <= cols; k += V::kLanes, out += step) V::store(out, E::load(a + k));
  if (k < cols) V::store(out, E::load_n(a + k, cols - k));
}

// sums(t, r) = sum over one block of k of A(t, k) * W(r, k), both packed.   sums: [T][4]
template <class V, int T>
HELM_INLINE void panel_tile_n(const float* a, const float* w, int64_t steps, float* sums) {
  using F = typename V::F;
  F acc[T][kQuad];
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    HELM_UNROLL
    for (int r = 0; r < kQuad; ++r) acc[t][r] = V::zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    F y[T];
    HELM_UNROLL
    for (int t = 0; t < T; ++t) y[t] = V::load(a + t * V::kLanes);
    HELM_UNROLL
    for (int r = 0; r < kQuad; ++r) {
      const F x = V::load(w + r * V::kLanes);
      HELM_UNROLL
      for (int t = 0; t < T; ++t) acc[t][r] = V::fma(x, y[t], acc[t][r]);
    }
    a += T * V::kLanes;
    w += kQuad * V::kLanes;
  }
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    V::reduce4(acc[t][0], acc[t][1], acc[t][2], acc[t][3], sums + t * kQuad);
  }
}

template <class V>
HELM_INLINE void panel_tile(const float* a, const float* w, int64_t steps, int64_t tokens,
                            float* sums) {
  switch (tokens) {
    case 1:
      return panel_tile_n<V, 1>(a, w, steps, sums);
    case 2:
      return panel_tile_n<V, 2>(a, w, steps, sums);
    case 3:
      if constexpr (V::kTileTokens >= 3) return panel_tile_n<V, 3>(a, w, steps, sums);
      break;
    case 4:
      if constexpr (V::kTileTokens >= 4) return panel_tile_n<V, 4>(a, w, steps, sums);
      break;
    case 5:
      if constexpr (V::kTileTokens >= 5) return panel_tile_n<V, 5>(a, w, steps, sums);
      break;
    default:
      if constexpr (V::kTileTokens >= 6) return panel_tile_n<V, 6>(a, w, steps, sums);
      break;
  }
}

// One tile of tokens against every packed quad of a panel: c(t, r) += sums(t, r).
template <class V>
void sweep_panel(const float* a, int64_t tokens, const float* w, int64_t rows, int64_t steps,
                 float* c, int64_t c_stride) {
  for (int64_t r = 0; r < rows; r += kQuad) {
    alignas(64) float sums[V::kTileTokens * kQuad];
    panel_tile<V>(a, w + r * steps * V::kLanes, steps, tokens, sums);
    const int64_t n = min_of(kQuad, rows - r);
    for (int64_t t = 0; t < tokens; ++t) {
      float* out = c + t * c_stride + r;
      if (n == kQuad) {
        for (int i = 0; i < kQuad; ++i) out[i] += sums[t * kQuad + i];
      } else {
        for (int64_t i = 0; i < n; ++i) out[i] += sums[t * kQuad + i];
      }
    }
  }
}

// Many tokens: panels of V::kPanelRows rows x one block of k are widened once into scratch (L2) and
// swept by every tile of tokens, itself packed (L1).
template <class V, DType D>
void matmul_panel(const MatmulArgs& m) {
  using Store = typename Elem<V, D>::Store;
  float* a_tile = static_cast<float*>(m.scratch);
  float* panel = a_tile + V::kTileTokens * V::kBlock;
  for (int64_t r0 = 0; r0 < m.rows; r0 += V::kPanelRows) {
    const int64_t rows = min_of(V::kPanelRows, m.rows - r0);
    for (int64_t t = 0; t < m.tokens; ++t) {
      for (int64_t r = r0; r < r0 + rows; ++r) m.c[t * m.c_stride + r] = start_value(m, t, r);
    }
    for (int64_t k0 = 0; k0 < m.cols; k0 += V::kBlock) {
      const int64_t cols = min_of(V::kBlock, m.cols - k0);
      const int64_t steps = (cols + V::kLanes - 1) / V::kLanes;
      for (int64_t r = 0; r < rows; r += kQuad) {
        pack_quad<V, D>(static_cast<const Store*>(m.w) + (r0 + r) * m.cols + k0, m.cols, rows - r,
                        cols, panel + r * steps * V::kLanes);
      }
      for (int64_t t0 = 0; t0 < m.tokens; t0 += V::kTileTokens) {
        const int64_t tokens = min_of(V::kTileTokens, m.tokens - t0);
        for (int64_t t = 0; t < tokens; ++t) {
          pack_token<V, DType::kF32>(m.a + (t0 + t) * m.a_stride + k0, tokens, cols,
                                     a_tile + t * V::kLanes);
        }
        sweep_panel<V>(a_tile, tokens, panel, rows, steps, m.c + t0 * m.c_stride + r0, m.c_stride);
      }
    }
  }
}

template <class V>
int64_t matmul_scratch_bytes() {
  return (V::kTileTokens + V::kPanelRows) * V::kBlock * static_cast<int64_t>(sizeof(float));
}

template <class V, DType D>
void matmul(const MatmulArgs& m) {
  if (m.tokens <= V::kDirectTokens) return matmul_direct<V, D>(m, kPrefetchBytes);
  matmul_panel<V, D>(m);
}

}  // namespace
}  // namespace helm::cpu
