// Matrix products of many tokens, bound by arithmetic: panels of weights in L2, tiles of tokens in
// L1. The order of the sums is that of matmul.h.
#pragma once

#include "cpu/kernels/matmul_direct.h"

namespace helm::cpu {
namespace {

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

// The same without conversion, as [steps][4][step] elements of the weights' dtype.
template <class Store, int64_t kStep>
void copy_quad(const Store* w, int64_t stride, int64_t rows, int64_t cols, Store* out) {
  for (int64_t k = 0; k < cols; k += kStep) {
    const int64_t n = min_of(kStep, cols - k);
    HELM_UNROLL
    for (int64_t r = 0; r < kQuad; ++r, out += kStep) {
      // The rows of the next quad: pieces far apart, too short for hardware to follow.
      __builtin_prefetch(w + (r + kQuad) * stride + k);
      if (r < rows && n == kStep) {
        __builtin_memcpy(out, w + r * stride + k, kStep * sizeof(Store));
        continue;
      }
      __builtin_memset(out, 0, kStep * sizeof(Store));
      if (r < rows) {
        __builtin_memcpy(out, w + r * stride + k, static_cast<size_t>(n) * sizeof(Store));
      }
    }
  }
}

// A tile of `tokens` rows of A on its way to [steps][tokens][kStep], columns beyond zero, some
// steps at a time: done between other work, as its rows come from a cache far away.
template <class P>
class TilePacker {
 public:
  TilePacker(const float* a, int64_t stride, int64_t tokens, int64_t cols, typename P::Packed* out)
      : a_(a), stride_(stride), tokens_(tokens), cols_(cols), out_(out) {}

  void pack(int64_t steps) {
    for (; steps > 0 && k_ < cols_; --steps, k_ += P::kStep) {
      const float* from = a_ + k_;
      if (k_ + P::kStep <= cols_) {
        for (int64_t t = 0; t < tokens_; ++t, from += stride_, out_ += P::kStep) {
          HELM_UNROLL
          for (int64_t i = 0; i < P::kStep; i += kFloats) __builtin_prefetch(from + kAhead + i);
          P::store_packed(out_, P::load_a(from));
        }
      } else {
        for (int64_t t = 0; t < tokens_; ++t, from += stride_, out_ += P::kStep) {
          P::store_packed(out_, P::load_a_n(from, cols_ - k_));
        }
      }
    }
  }
  void pack_rest() { pack((cols_ - k_ + P::kStep - 1) / P::kStep); }

 private:
  static constexpr int64_t kFloats = kLineBytes / static_cast<int64_t>(sizeof(float));
  static constexpr int64_t kAhead = 2 * P::kStep;

  const float* a_;
  int64_t stride_, tokens_, cols_;
  typename P::Packed* out_;
  int64_t k_ = 0;
};

// C(t, r) += sum over one block of k of A(t, k) * W(r, k), both packed, for the first `rows` of a
// quad.
template <class P, int T>
HELM_INLINE void panel_tile(const typename P::Packed* a, const typename P::Store* w, int64_t steps,
                            int64_t rows, float* c, int64_t c_stride) {
  using V = typename P::V;
  typename V::F acc[T][kQuad];
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    HELM_UNROLL
    for (int r = 0; r < kQuad; ++r) acc[t][r] = V::zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    typename P::A y[T];
    HELM_UNROLL
    for (int t = 0; t < T; ++t) y[t] = P::load_packed(a + t * P::kStep);
    HELM_UNROLL
    for (int r = 0; r < kQuad; ++r) {
      const typename P::W x = P::load_w(w + r * P::kStep);
      HELM_UNROLL
      for (int t = 0; t < T; ++t) acc[t][r] = P::fma(x, y[t], acc[t][r]);
    }
    a += T * P::kStep;
    w += kQuad * P::kStep;
  }
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    float sums[kQuad];
    V::reduce4(acc[t][0], acc[t][1], acc[t][2], acc[t][3], sums);
    float* out = c + t * c_stride;
    if (rows >= kQuad) {
      HELM_UNROLL
      for (int i = 0; i < kQuad; ++i) out[i] += sums[i];
    } else {
      for (int64_t i = 0; i < rows; ++i) out[i] += sums[i];
    }
  }
}

// A tile of T tokens against every packed quad of a panel, the next tile being packed meanwhile.
template <class P, int T>
void sweep_tile(const typename P::Packed* a, const typename P::Store* w, int64_t rows,
                int64_t steps, float* c, int64_t c_stride, TilePacker<P>& next) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(float));
  const int64_t quads = (rows + kQuad - 1) / kQuad, per_quad = (steps + quads - 1) / quads;
  for (int64_t r = 0; r < rows; r += kQuad) {
    if (r % kLine == 0) {
      HELM_UNROLL
      for (int t = 0; t < T; ++t) __builtin_prefetch(c + t * c_stride + r + kLine, 1);
    }
    next.pack(per_quad);
    panel_tile<P, T>(a, w + r * steps * P::kStep, steps, rows - r, c + r, c_stride);
  }
  next.pack_rest();
}

template <class P>
HELM_INLINE void sweep(const typename P::Packed* a, int64_t tokens, const typename P::Store* w,
                       int64_t rows, int64_t steps, float* c, int64_t c_stride,
                       TilePacker<P>& next) {
  constexpr int kMax = P::V::kTileTokens;
  switch (tokens) {
    case 1:
      return sweep_tile<P, 1>(a, w, rows, steps, c, c_stride, next);
    case 2:
      return sweep_tile<P, 2>(a, w, rows, steps, c, c_stride, next);
    case 3:
      if constexpr (kMax >= 3) return sweep_tile<P, 3>(a, w, rows, steps, c, c_stride, next);
      break;
    case 4:
      if constexpr (kMax >= 4) return sweep_tile<P, 4>(a, w, rows, steps, c, c_stride, next);
      break;
    case 5:
      if constexpr (kMax >= 5) return sweep_tile<P, 5>(a, w, rows, steps, c, c_stride, next);
      break;
    default:
      if constexpr (kMax >= 6) return sweep_tile<P, 6>(a, w, rows, steps, c, c_stride, next);
      break;
  }
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

// Panels of rows x one block of k are packed once into scratch (L2) and swept by every tile of
// tokens, itself packed (L1) while the one before it sweeps. P is the product over what a panel
// holds: weights as they are stored, so that each tile converts them again, which hides behind the
// multiply-adds and halves what L2 has to deliver; or widened to f32 where conversions are slow.
template <class P, DType D>
void panel_product(const MatmulArgs& m) {
  using V = typename P::V;
  using Weight = typename P::Store;
  constexpr bool kWiden = V::kWidenPanels;
  constexpr int64_t kPanelRows =
      P::kPanelBytes / (P::kBlock * static_cast<int64_t>(sizeof(Weight)));
  const auto* w = static_cast<const typename Elem<V, D>::Store*>(m.w);
  auto* panel = static_cast<Weight*>(m.scratch);
  auto* packed =
      reinterpret_cast<typename P::Packed*>(static_cast<char*>(m.scratch) + P::kPanelBytes);
  typename P::Packed* const buffers[2] = {packed, packed + V::kTileTokens * P::kBlock};
  const int64_t tiles = (m.tokens + V::kTileTokens - 1) / V::kTileTokens;
  for (int64_t r0 = 0; r0 < m.rows; r0 += kPanelRows) {
    const int64_t rows = min_of(kPanelRows, m.rows - r0);
    for (int64_t k0 = 0; k0 < m.cols; k0 += P::kBlock) {
      const int64_t cols = min_of(P::kBlock, m.cols - k0);
      const int64_t steps = (cols + P::kStep - 1) / P::kStep;
      for (int64_t r = 0; r < rows; r += kQuad) {
        const auto* from = w + (r0 + r) * m.cols + k0;
        Weight* to = panel + r * steps * P::kStep;
        if constexpr (kWiden) {
          pack_quad<V, D>(from, m.cols, rows - r, cols, to);
        } else {
          copy_quad<Weight, P::kStep>(from, m.cols, rows - r, cols, to);
        }
      }
      const auto first = [&](int64_t tile) {
        return m.tokens * tile / tiles;
      };  // as even as can be
      const auto packer = [&](int64_t tile) {
        const int64_t t = first(tile), tokens = first(tile + 1) - t;
        return TilePacker<P>(m.a + t * m.a_stride + k0, m.a_stride, tokens, tile < tiles ? cols : 0,
                             buffers[tile % 2]);
      };
      packer(0).pack_rest();
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t t = first(i), tokens = first(i + 1) - t;
        if (k0 == 0) start_rows(m, t, tokens, r0, rows);
        TilePacker<P> next = packer(i + 1);
        sweep<P>(buffers[i % 2], tokens, panel, rows, steps, m.c + t * m.c_stride + r0, m.c_stride,
                 next);
      }
    }
  }
}

template <class P>
constexpr int64_t panel_scratch_bytes() {
  return P::kPanelBytes +
         2 * P::V::kTileTokens * P::kBlock * static_cast<int64_t>(sizeof(typename P::Packed));
}

}  // namespace
}  // namespace helm::cpu
