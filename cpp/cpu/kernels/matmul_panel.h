// Matrix products of many tokens, bound by arithmetic: panels of weights in L2, tiles of tokens in
// L1. The order of the sums is that of matmul.h, where each lane of a vector holds a sum along k;
// here a vector runs along the rows of W, and those sums are computed one after the other and then
// added as V::reduce adds lanes. So no vector is summed across, and a tile meets as many tokens as
// there are registers: a word of either operand serves many multiply-adds.
#pragma once

#include "cpu/kernels/matmul_direct.h"

namespace helm::cpu {
namespace {

// 0, 2, 1, 3: how reduce adds four lanes, and four fours, if it always adds the last two sums that
// are of equally many.
HELM_INLINE constexpr int added(int i) {
  return (i & 1) * 2 + (i >> 1);
}
template <class V>
constexpr int lane_added(int i) {
  return 4 * (V::kLanes == 16 ? added(i / 4) : i / 4) + added(i % 4);
}

template <class V>
constexpr int kPanelTileRows = V::kPanelVectors * V::kLanes;

template <class P>
constexpr int64_t panel_steps(int64_t cols) {
  return (cols + P::kStep - 1) / P::kStep;
}

// Words of one lane in a packed tile of weights: a line more than there are, as the lanes are
// written together and would all fall into one set of L1.
template <class V>
constexpr int64_t lane_words(int64_t steps) {
  return steps * kPanelTileRows<V> + kLineBytes / 4;
}

template <class V>
constexpr int64_t panel_tile_words(int64_t steps) {
  return V::kLanes * lane_words<V>(steps);
}

// Packs up to kPanelTileRows rows of `cols` elements, `stride` apart, as [lane][step][row] words,
// lanes in the order of lane_added, with zeros where there is no row or no column.
template <class P>
void pack_rows(const typename P::Store* w, int64_t stride, int64_t rows, int64_t cols, float* out) {
  using V = typename P::V;
  constexpr int64_t kRows = kPanelTileRows<V>;
  constexpr int64_t kAhead = 4 * kLineBytes / static_cast<int64_t>(sizeof(typename P::Store));
  const int64_t steps = panel_steps<P>(cols);
  for (int64_t r0 = 0; r0 < kRows; r0 += V::kLanes) {
    const int64_t some = min_of(V::kLanes, rows - r0);
    for (int64_t s = 0; s < steps; ++s) {
      const typename P::Store* from = w + r0 * stride + s * P::kStep;
      const int64_t n = cols - s * P::kStep;
      typename V::F x[V::kLanes];
      if (some == V::kLanes && n >= P::kStep) {
        HELM_UNROLL
        for (int r = 0; r < V::kLanes; ++r) {
          __builtin_prefetch(from + r * stride + kAhead);
          x[r] = P::words(P::load_w(from + r * stride));
        }
      } else {
        for (int r = 0; r < V::kLanes; ++r) {
          if (r >= some) {
            x[r] = V::zero();
          } else if (n >= P::kStep) {
            x[r] = P::words(P::load_w(from + r * stride));
          } else {
            x[r] = P::words(P::load_w_n(from + r * stride, n));
          }
        }
      }
      V::transpose(x);
      HELM_UNROLL
      for (int i = 0; i < V::kLanes; ++i) {
        V::store(out + i * lane_words<V>(steps) + s * kRows + r0, x[lane_added<V>(i)]);
      }
    }
  }
}

// Tokens are cut into tiles of at most kPanelTokens, as even as can be.
template <class V>
struct TokenTiles {
  int64_t tokens;

  constexpr int64_t count() const { return (tokens + V::kPanelTokens - 1) / V::kPanelTokens; }
  int64_t first(int64_t tile) const { return tokens * tile / count(); }
  int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
};

// Where a tile of tokens lies in packed A: [block of k][tile][four lanes][step][token][4] words.
template <class P>
int64_t packed_offset(int64_t tokens, int64_t first, int64_t k0, int64_t steps) {
  return (tokens * (k0 / P::kStep) + first * steps) * P::V::kLanes;
}

// KernelTable::pack, with zeros beyond the last column.
template <class P>
void pack_tokens(const PackArgs& p, int64_t tile) {
  using V = typename P::V;
  const TokenTiles<V> tiles{p.tokens};
  const int64_t first = tiles.first(tile), tokens = tiles.size(tile);
  for (int64_t k0 = 0; k0 < p.cols; k0 += P::kBlock) {
    const int64_t cols = min_of(P::kBlock, p.cols - k0), steps = panel_steps<P>(cols);
    const int64_t fours = steps * tokens * 4;
    float* to = static_cast<float*>(p.packed) + packed_offset<P>(p.tokens, first, k0, steps);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* from = p.a + (first + t) * p.a_stride + k0;
      float* out = to + t * 4;
      int64_t k = 0;
      for (; k + P::kStep <= cols; k += P::kStep, out += tokens * 4) {
        V::store_fours(out, fours, P::words(P::load_a(from + k)));
      }
      if (k < cols) V::store_fours(out, fours, P::words(P::load_a_n(from + k, cols - k)));
    }
  }
}

// Where a tile's sums go: C(t, r) = [C(t, r)] + sum. Without what C holds it is not read, which
// would be to wait for memory where C is in no cache.
struct Sums {
  float* c;
  int64_t stride;
  bool accumulate;
};

// acc(t, r) = the sum over one block of k and kPanelLanes lanes of A(t, k) * W(r, k), both packed,
// for T tokens. Two lanes are added in registers: sums that wait in memory cost a twelfth of the
// time where k is 1024.
template <class P, int T>
HELM_INLINE void lane_sums(const float* a, const float* w, int64_t steps,
                           typename P::V::F (&acc)[T][P::V::kPanelVectors]) {
  using V = typename P::V;
  constexpr int N = V::kPanelVectors, L = V::kPanelLanes;
  static_assert(L == 1 || L == 2);
  const int64_t w_lane = lane_words<V>(steps);
  typename V::F second[T][N];  // of the second lane
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    HELM_UNROLL
    for (int n = 0; n < N; ++n) acc[t][n] = second[t][n] = V::zero();
  }
  const auto step = [&](int64_t s) HELM_LAMBDA_INLINE {
    typename P::W x[L][N];
    HELM_UNROLL
    for (int l = 0; l < L; ++l) {
      const float* at = w + l * w_lane + s * kPanelTileRows<V>;
      HELM_UNROLL
      for (int n = 0; n < N; ++n) x[l][n] = P::packed_w(at + n * V::kLanes);
    }
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      HELM_UNROLL
      for (int l = 0; l < L; ++l) {
        const typename P::A y = P::packed_a(a + (s * T + t) * 4 + added(l));
        auto& sums = l == 0 ? acc : second;
        HELM_UNROLL
        for (int n = 0; n < N; ++n) sums[t][n] = P::fma(x[l][n], y, sums[t][n]);
      }
    }
    keep_order<V>();
  };
  const auto some = [&](auto count) HELM_LAMBDA_INLINE {
    constexpr int S = decltype(count)::value;
    HELM_UNROLL
    for (int s = 0; s < S; ++s) step(s);
    w += S * kPanelTileRows<V>;
    a += S * T * 4;
  };
  int64_t left = steps;
  for (; left >= V::kPanelUnroll; left -= V::kPanelUnroll) some(Count<V::kPanelUnroll>{});
  for (; left > 0; --left) some(Count<1>{});
  if constexpr (L == 1) return;
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    HELM_UNROLL
    for (int n = 0; n < N; ++n) acc[t][n] = V::add(acc[t][n], second[t][n]);
  }
}

// Adds the sum over one block of k of A(t, k) * W(r, k), both packed, for T tokens and the first
// `rows` of a tile's.
template <class P, int T>
HELM_INLINE void panel_tile(const float* a, const float* w, int64_t steps, int64_t rows, Sums to,
                            const float* next, int64_t next_lines) {
  using V = typename P::V;
  using F = typename V::F;
  constexpr int N = V::kPanelVectors, L = V::kPanelLanes, kTurns = V::kLanes / L;
  constexpr int kLevels = kTurns == 8 ? 3 : 2;
  static_assert(1 << kLevels == kTurns);
  alignas(kLineBytes) F sums[kLevels][T][N];  // of 1, 2 and 4 turns, waiting for as many others
  F acc[T][N];
  for (int i = 0; i < kTurns; ++i) {
    // A little in every turn: as many requests at once would keep its own loads waiting.
    for (int j = T * N * i / kTurns; j < T * N * (i + 1) / kTurns; ++j) {
      __builtin_prefetch(to.c + j / N * to.stride + j % N * V::kLanes, 1);
    }
    for (int64_t j = next_lines * i / kTurns; j < next_lines * (i + 1) / kTurns; ++j) {
      __builtin_prefetch(next + j * (kLineBytes / 4), 0, 2);
    }
    const int lane = i * L;
    lane_sums<P>(a + lane / 4 * steps * T * 4 + added(lane % 4), w + lane * lane_words<V>(steps),
                 steps, acc);
    int level = 0;
    for (; (i >> level & 1) != 0; ++level) {
      HELM_UNROLL
      for (int t = 0; t < T; ++t) {
        HELM_UNROLL
        for (int n = 0; n < N; ++n) acc[t][n] = V::add(sums[level][t][n], acc[t][n]);
      }
    }
    if (level == kLevels) break;
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      HELM_UNROLL
      for (int n = 0; n < N; ++n) sums[level][t][n] = acc[t][n];
    }
  }
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    HELM_UNROLL
    for (int n = 0; n < N; ++n) {
      float* out = to.c + t * to.stride + n * V::kLanes;
      const int64_t some = rows - n * V::kLanes;
      if (some >= V::kLanes) {
        V::store(out, V::add(to.accumulate ? V::load(out) : V::zero(), acc[t][n]));
      } else if (some > 0) {
        const F before = to.accumulate ? V::load_n(out, some) : V::zero();
        V::store_n(out, V::add(before, acc[t][n]), some);
      }
    }
  }
}

// A tile of T tokens against every packed tile of a panel's rows. What follows in packed A, the
// next tile, is fetched meanwhile.
template <class P, int T>
void sweep_tile(const float* a, const float* w, int64_t rows, int64_t steps, Sums to) {
  using V = typename P::V;
  constexpr int64_t kRows = kPanelTileRows<V>, kLine = kLineBytes / 4;
  const int64_t words = T * V::kLanes * steps;
  const int64_t lines = words / kLine / ((rows + kRows - 1) / kRows);
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t tile = r / kRows;
    panel_tile<P, T>(a, w + tile * panel_tile_words<V>(steps), steps, rows - r, to,
                     a + words + tile * lines * kLine, lines);
    to.c += kRows;
  }
}

// The fewest tokens that a tile can have when more than kDirectTokens are cut evenly: the first
// numbers are the worst.
template <class V>
constexpr int64_t least_tile() {
  int64_t least = V::kPanelTokens;
  for (int64_t n = V::kDirectTokens + 1; n <= V::kDirectTokens + V::kPanelTokens; ++n) {
    least = min_of(least, n / TokenTiles<V>{n}.count());
  }
  return least;
}

template <class P, int T = P::V::kPanelTokens>
void sweep(const float* a, int64_t tokens, const float* w, int64_t rows, int64_t steps, Sums to) {
  if constexpr (T > least_tile<typename P::V>()) {
    if (tokens < T) return sweep<P, T - 1>(a, tokens, w, rows, steps, to);
  }
  sweep_tile<P, T>(a, w, rows, steps, to);
}

// Where the sums of `rows` rows of C begin: [C] + [bias].
inline void start_rows(const MatmulArgs& m, int64_t token, int64_t tokens, int64_t row,
                       int64_t rows) {
  for (int64_t t = token; t < token + tokens; ++t) {
    float* c = m.c + t * m.c_stride + row;
    if (!m.accumulate) __builtin_memset(c, 0, static_cast<size_t>(rows) * sizeof(float));
    if (!m.bias) continue;
    for (int64_t r = 0; r < rows; ++r) c[r] += m.bias[row + r];
  }
}

// Of packed weights; more where they are made plain first.
template <class P>
constexpr int64_t panel_scratch_bytes() {
  using V = typename P::V;
  static_assert(V::kPanelRows % kPanelTileRows<V> == 0);
  return 4 * (V::kPanelRows / kPanelTileRows<V>)*panel_tile_words<V>(panel_steps<P>(P::kBlock));
}

// Panels of rows x one block of k are packed once into scratch (L2), widened unless products are of
// narrow pairs, and swept by every tile of tokens, which are packed already. More than
// kDirectTokens tokens.
template <class P, class Weights>
void panel_product(const MatmulArgs& m, const Weights& w) {
  using V = typename P::V;
  constexpr int64_t kTileRows = kPanelTileRows<V>;
  static_assert(P::kBlock <= Weights::kCols);
  const auto* packed = static_cast<const float*>(m.packed);
  auto* panel = static_cast<float*>(m.scratch);
  const TokenTiles<V> tiles{m.tokens};
  for (int64_t r0 = 0; r0 < m.rows; r0 += V::kPanelRows) {
    const int64_t rows = min_of(V::kPanelRows, m.rows - r0);
    for (int64_t k0 = 0; k0 < m.cols; k0 += P::kBlock) {
      const int64_t cols = min_of(P::kBlock, m.cols - k0), steps = panel_steps<P>(cols);
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const int64_t some = min_of(kTileRows, rows - r);
        const auto stored = w.rows(r0 + r, 1, some, k0, cols);
        pack_rows<P>(stored.at, stored.step, some, cols,
                     panel + r / kTileRows * panel_tile_words<V>(steps));
      }
      for (int64_t i = 0; i < tiles.count(); ++i) {
        const int64_t t = tiles.first(i), tokens = tiles.size(i);
        if (k0 == 0 && m.bias) start_rows(m, t, tokens, r0, rows);
        const Sums to{m.c + t * m.c_stride + r0, m.c_stride, k0 > 0 || m.bias || m.accumulate};
        sweep<typename P::Words>(packed + packed_offset<P>(m.tokens, t, k0, steps), tokens, panel,
                                 rows, steps, to);
      }
    }
  }
}

}  // namespace
}  // namespace helm::cpu
