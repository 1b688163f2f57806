// Sixteen lanes in AVX-512 F/BW/DQ/VL. Knows nothing of the kernels over it.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/compressed.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

struct VecAvx512 {
  static constexpr int kLanes = 16;
  using F = __m512;

  static constexpr int64_t kBlock = 1024;  // k per accumulator, see matmul.h
  static constexpr int kScoreRows = 6;     // 4 x 6 accumulators + 4 + 1 of 32 registers
  static constexpr int kPanelTokens = 6;   // 2 x 2 x 6 accumulators + 4 + 1 of 32 registers
  static constexpr int kPanelVectors = 2;
  static constexpr int kPanelLanes = 2;
  static constexpr int kPanelUnroll = 1;
  static constexpr int64_t kPanelRows = 128;  // with a block of k half a megabyte, half of L2
  static constexpr int64_t kDirectTokens = 96;
  // Rows per direct tile by tokens. For one token four streams measured faster than six (Zen 4, a
  // twentieth where rows are of 2 KiB); of long rows eight, faster than six or twelve.
  static constexpr int kRowsPerTokens[7] = {0, 4, 4, 6, 6, 4, 4};
  static constexpr int kLongRowsPerTile = 8;  // see kColsInL1
  static constexpr int kDirectTile = 6;
  // Of several tiles, which compute longer than they read: rows far apart, and what they write,
  // fall into the same sets of the caches where rows are a power of two long (Zen 4, 8 to 64
  // tokens: f16 up to a twentieth, pairs of bf16 a tenth slower).
  static constexpr bool kRowsAdjoin = true;
  static constexpr bool kKeepOrder = false;
  // Rows per tile of compressed weights that it makes plain itself.
  static constexpr int kCompressedRowsPerTokens[7] = {0, 4, 4, 4, 4, 4, 4};
  static constexpr int kCompressedTile = 6;
  static constexpr int kOutputVectors[7] = {0, 8, 8, 4, 4, 4, 4};
  static constexpr bool kSplitBf16 = false;
  static constexpr bool kAskOnce = false;

  HELM_INLINE static F zero() { return _mm512_setzero_ps(); }
  HELM_INLINE static F set1(float v) { return _mm512_set1_ps(v); }
  HELM_INLINE static F load(const float* p) { return _mm512_loadu_ps(p); }
  HELM_INLINE static F load_n(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(mask(n), p);
  }
  HELM_INLINE static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  HELM_INLINE static void store_n(float* p, F v, int64_t n) {
    _mm512_mask_storeu_ps(p, mask(n), v);
  }

  HELM_INLINE static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_half(p)); }
  HELM_INLINE static F load_f16_n(const uint16_t* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p));
  }
  HELM_INLINE static F load_bf16(const uint16_t* p) { return widen_bf16(load_half(p)); }
  HELM_INLINE static F load_bf16_n(const uint16_t* p, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(mask(n), p));
  }
  HELM_INLINE static void store_f16(uint16_t* p, F v) { store_f16_n(p, v, kLanes); }
  HELM_INLINE static void store_f16_n(uint16_t* p, F v, int64_t n) {
    const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(p, mask(n), h);
  }
  HELM_INLINE static void store_bf16(uint16_t* p, F v) { store_bf16_n(p, v, kLanes); }
  HELM_INLINE static void store_bf16_n(uint16_t* p, F v, int64_t n) {
    _mm256_mask_storeu_epi16(p, mask(n), narrow_bf16(v));
  }

  HELM_INLINE static F load_i8(const int8_t* p) {
    return widen_i8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  HELM_INLINE static F load_i8_n(const int8_t* p, int64_t n) {
    return widen_i8(_mm_maskz_loadu_epi8(mask(n), p));
  }
  // Integral lanes of -128 to 127.
  HELM_INLINE static void store_i8_n(int8_t* p, F v, int64_t n) {
    _mm_mask_storeu_epi8(p, mask(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }

  HELM_INLINE static F add(F a, F b) { return _mm512_add_ps(a, b); }
  HELM_INLINE static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  HELM_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  HELM_INLINE static F div(F a, F b) { return _mm512_div_ps(a, b); }
  HELM_INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  HELM_INLINE static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  HELM_INLINE static F max(F a, F b) { return _mm512_max_ps(a, b); }
  HELM_INLINE static F min(F a, F b) { return _mm512_min_ps(a, b); }
  HELM_INLINE static F round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // a * 2^n for integral n
  HELM_INLINE static F scale(F a, F n) { return _mm512_scalef_ps(a, n); }

  // out[i] = sum of the lanes of x[i], for multiples of four: (x0 + x2) + (x1 + x3) in each
  // quarter, then the quarters as (q0 + q2) + (q1 + q3)
  template <int N>
  HELM_INLINE static void reduce(const F* x, float* out) {
    constexpr int kSixteens = N / 16 * 16;
    HELM_UNROLL
    for (int i = 0; i < kSixteens; i += 16) {
      const F a = add_halves(add_in_quarters(x + i), add_in_quarters(x + i + 4));
      const F b = add_halves(add_in_quarters(x + i + 8), add_in_quarters(x + i + 12));
      store(out + i, add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)));
    }
    HELM_UNROLL
    for (int i = kSixteens; i < N; i += 4) {
      const F s = add_in_quarters(x + i);
      const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
      _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
    }
  }
  HELM_INLINE static float sum(F a) {
    const F four[4] = {a, a, a, a};
    float out[4];
    reduce<4>(four, out);
    return out[0];
  }
  HELM_INLINE static float max_lane(F a) { return _mm512_reduce_max_ps(a); }

  // The high bytes of a row of compressed.h by code, in each quarter.
  using HighBytes = __m512i;
  HELM_INLINE static HighBytes high_bytes(uint8_t base) {
    const __m128i codes = _mm_load_si128(reinterpret_cast<const __m128i*>(kHighBytes));
    return _mm512_broadcast_i32x4(_mm_add_epi8(codes, _mm_set1_epi8(static_cast<char>(base))));
  }
  // Words of bf16, two vectors of them from one of their low bytes and one of codes.
  using Words = __m512i;
  template <int Shift>
  HELM_INLINE static void decompress(const std::byte* codes, const std::byte* low, HighBytes high,
                                     Words (&out)[2]) {
    const __m512i shifted = _mm512_srli_epi16(_mm512_loadu_si512(codes), Shift);
    const __m512i h = _mm512_shuffle_epi8(high, _mm512_and_si512(shifted, _mm512_set1_epi8(0x0f)));
    const __m512i l = _mm512_loadu_si512(low);
    out[0] = _mm512_unpacklo_epi8(l, h), out[1] = _mm512_unpackhi_epi8(l, h);
  }
  HELM_INLINE static void store_words(uint16_t* p, Words v) { _mm512_storeu_si512(p, v); }
  // Floats of words that lie as place_of_float says, the first or the second vector; and the words
  // in the order of the weights.
  template <int Half>
  HELM_INLINE static F widen_words(Words v) {
    const __m512i zero = _mm512_setzero_si512();
    return _mm512_castsi512_ps(Half == 0 ? _mm512_unpacklo_epi16(zero, v)
                                         : _mm512_unpackhi_epi16(zero, v));
  }
  HELM_INLINE static Words in_order(Words v) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
  }

  // Four lanes each, in the order in which reduce adds them, to p, p + stride, ...
  HELM_INLINE static void store_fours(float* p, int64_t stride, F v) {
    _mm_storeu_ps(p, _mm512_castps512_ps128(v));
    _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(v, 2));
    _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(v, 1));
    _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(v, 3));
  }
  // Lane j of x[i] becomes lane i of x[j].
  HELM_INLINE static void transpose(F (&x)[kLanes]) {
    F y[kLanes];
    HELM_UNROLL
    for (int i = 0; i < kLanes; i += 2) {
      y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    HELM_UNROLL
    for (int i = 0; i < kLanes; i += 4) {  // x[i + c], quarter q: lane 4q + c of rows i to i + 3
      x[i] = _mm512_shuffle_ps(y[i], y[i + 2], 0x44);
      x[i + 1] = _mm512_shuffle_ps(y[i], y[i + 2], 0xee);
      x[i + 2] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0x44);
      x[i + 3] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    HELM_UNROLL
    for (int c = 0; c < 4; ++c) {
      const F even = _mm512_shuffle_f32x4(x[c], x[4 + c], 0x88);
      const F odd = _mm512_shuffle_f32x4(x[c], x[4 + c], 0xdd);
      const F more_even = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0x88);
      const F more_odd = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0xdd);
      y[c] = _mm512_shuffle_f32x4(even, more_even, 0x88);
      y[4 + c] = _mm512_shuffle_f32x4(odd, more_odd, 0x88);
      y[8 + c] = _mm512_shuffle_f32x4(even, more_even, 0xdd);
      y[12 + c] = _mm512_shuffle_f32x4(odd, more_odd, 0xdd);
    }
    HELM_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }

 private:
  // Lane i of each quarter: the sum of that quarter of x[i].
  HELM_INLINE static F add_in_quarters(const F* x) {
    const F ab = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const F cd = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  // Of a and then b: the first quarter and the third, the second and the fourth.
  HELM_INLINE static F add_halves(F a, F b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  HELM_INLINE static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
  HELM_INLINE static __m256i load_half(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  HELM_INLINE static F widen_bf16(__m256i h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  HELM_INLINE static F widen_i8(__m128i b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }
  HELM_INLINE static __m256i narrow_bf16(F v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i r = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(r);
  }
};

}  // namespace
}  // namespace helm::cpu
