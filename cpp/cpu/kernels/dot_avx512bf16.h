// Products of bf16 pairs: AVX512-BF16 over the lanes of AVX-512. Knows nothing of tiles.
#pragma once

#include "cpu/kernels/matmul.h"
#include "cpu/kernels/vec_avx512.h"

namespace helm::cpu {
namespace {

// Activations are rounded to bf16, nearest even; products and sums are f32. vdpbf16ps does two
// products per lane and issues as often as an f32 FMA (Zen 4), so twice as many. It flushes
// denormals.
struct DotBf16 {
  using V = VecAvx512;
  using F = V::F;
  using Store = uint16_t;
  using W = __m512bh;
  using A = __m512bh;
  using Input = float;
  using Words = DotBf16;
  static constexpr int64_t kStep = 32;
  static constexpr int64_t kBlock = 2 * V::kBlock;  // as many steps between reductions as f32

  HELM_INLINE static W load_w(const Store* p) { return (W)_mm512_loadu_si512(p); }
  HELM_INLINE static W load_w_n(const Store* p, int64_t n) {
    return (W)_mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, p);
  }
  HELM_INLINE static A load_a(const float* p) {
    return _mm512_cvtne2ps_pbh(V::load(p + V::kLanes), V::load(p));
  }
  HELM_INLINE static A load_a_n(const float* p, int64_t n) {
    if (n <= V::kLanes) return _mm512_cvtne2ps_pbh(V::zero(), V::load_n(p, n));
    return _mm512_cvtne2ps_pbh(V::load_n(p + V::kLanes, n - V::kLanes), V::load(p));
  }
  static constexpr int kPerWords = 1;
  static constexpr Place place(int weight) { return place_of_word(weight); }
  template <int>
  HELM_INLINE static W from_words(V::Words v) {
    return (W)v;
  }
  HELM_INLINE static V::Words in_order(V::Words v) { return v; }
  static constexpr int kCompressedTile = 8;
  static constexpr int kCompressedRows[kCompressedTile + 1] = {0, 4, 4, 4, 4, 4, 4, 4, 3};
  HELM_INLINE static F words(W v) { return (F)v; }
  HELM_INLINE static W packed_w(const float* p) { return (W)V::load(p); }
  HELM_INLINE static A packed_a(const float* p) { return (A)V::set1(*p); }
  HELM_INLINE static F fma(W w, A a, F acc) { return _mm512_dpbf16_ps(acc, w, a); }
};

// A row of n elements, padded with zeros to whole steps.
inline void round_row(const float* a, int64_t n, uint16_t* out) {
  for (int64_t k = 0; k < n; k += DotBf16::kStep) {
    const int64_t rest = n - k;
    const DotBf16::A words =
        rest >= DotBf16::kStep ? DotBf16::load_a(a + k) : DotBf16::load_a_n(a + k, rest);
    _mm512_storeu_si512(out + k, (__m512i)words);
  }
}

// The same with inputs rounded beforehand, rows padded with zeros to whole steps.
struct DotRounded : DotBf16 {
  using Input = uint16_t;
  HELM_INLINE static A load_a(const Input* p) { return load_w(p); }
  HELM_INLINE static A load_a_n(const Input* p, int64_t) { return load_w(p); }
};

// C(t, r) as matmul.h defines it, A rounded to bf16. A few tokens are rounded once instead of once
// per group of rows, as many at a time as scratch can hold. Their rows lie a line more apart than
// they are long, as those a power of two apart slow each other down in L1 (Zen 4: a tenth).
template <class Weights>
void matmul_bf16_of(const MatmulArgs& m, const Weights& w) {
  if (m.tokens > VecAvx512::kDirectTokens) return panel_product<DotBf16>(m, w);
  constexpr int64_t kBytes = sizeof(uint16_t);
  const int64_t stride = round_up(m.cols, DotBf16::kStep) + kLineBytes / kBytes;
  const int64_t most = panel_scratch_bytes<DotBf16>() / (stride * kBytes);
  if (m.tokens == 1 || most == 0) return direct_product<DotBf16>(m, w);
  auto* rounded = static_cast<uint16_t*>(m.scratch);
  MatmulArgs part = m;
  part.a = static_cast<const float*>(m.scratch);
  part.a_stride = stride;
  const int64_t parts = (m.tokens + most - 1) / most;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t first = m.tokens * i / parts, end = m.tokens * (i + 1) / parts;
    if (parts > 1 || !m.same_input) {
      for (int64_t t = first; t < end; ++t) {
        round_row(m.a + t * m.a_stride, m.cols, rounded + (t - first) * stride);
      }
    }
    part.tokens = end - first;
    part.c = m.c + first * m.c_stride;
    direct_product<DotRounded>(part, w);
  }
}

inline void matmul_bf16(const MatmulArgs& m) {
  matmul_bf16_of(m, StoredWeights<VecAvx512, uint16_t>{static_cast<const uint16_t*>(m.w), m.cols});
}

inline void matmul_compressed_bf16(const MatmulArgs& m, const CompressedMatrix& w) {
  matmul_bf16_of(m, compressed_weights<DotBf16>(w, m.scratch));
}

}  // namespace
}  // namespace helm::cpu
