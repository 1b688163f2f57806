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
  using Packed = uint16_t;
  static constexpr int64_t kStep = 32;
  static constexpr int64_t kBlock = 2 * V::kBlock;  // as many steps between reductions as f32
  // Rounding a tile of activations takes long beside products this fast: more rows share it, and
  // every processor with AVX512-BF16 has 1 MiB of L2.
  static constexpr int64_t kPanelBytes = int64_t{512} << 10;

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
  HELM_INLINE static A load_packed(const Packed* p) { return load_w(p); }
  HELM_INLINE static void store_packed(Packed* p, A a) { _mm512_storeu_si512(p, (__m512i)a); }
  HELM_INLINE static F fma(W w, A a, F acc) { return _mm512_dpbf16_ps(acc, w, a); }
};

// The same with inputs rounded beforehand, rows padded with zeros to whole steps.
struct DotRounded : DotBf16 {
  using Input = uint16_t;
  HELM_INLINE static A load_a(const Input* p) { return load_w(p); }
  HELM_INLINE static A load_a_n(const Input* p, int64_t) { return load_w(p); }
};

// C(t, r) as matmul.h defines it, A rounded to bf16. A few tokens are rounded once per call instead
// of once per group of rows, if scratch can hold them.
inline void matmul_bf16(const MatmulArgs& m) {
  const int64_t stride = round_up(m.cols, DotBf16::kStep);
  const int64_t bytes = m.tokens * stride * static_cast<int64_t>(sizeof(uint16_t));
  if (m.tokens == 1) return few_tokens<DotBf16>(m);
  if (m.tokens > VecAvx512::kDirectTokens || bytes > DotBf16::kPanelBytes) {
    return panel_product<DotBf16, DType::kBF16>(m);
  }
  auto* rounded = static_cast<uint16_t*>(m.scratch);
  for (int64_t t = 0; t < m.tokens; ++t) {
    TilePacker<DotBf16>(m.a + t * m.a_stride, 0, 1, m.cols, rounded + t * stride).pack_rest();
  }
  MatmulArgs packed = m;
  packed.a = reinterpret_cast<const float*>(rounded);
  packed.a_stride = stride;
  few_tokens<DotRounded>(packed);
}

}  // namespace
}  // namespace helm::cpu
