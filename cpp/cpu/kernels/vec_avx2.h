// Eight lanes in AVX2 + FMA + F16C. Knows nothing of the kernels over it.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/compressed.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

struct VecAvx2 {
  static constexpr int kLanes = 8;
  using F = __m256;

  static constexpr int64_t kBlock = 1024;  // k per accumulator, see matmul.h
  static constexpr int kScoreRows = 3;     // 4 x 3 accumulators + 3 + 1 = 16 registers
  static constexpr int kPanelTokens = 6;   // 2 x 6 accumulators + 2 + 1 of 16 registers
  static constexpr int kPanelVectors = 2;
  static constexpr int kPanelLanes = 1;
  static constexpr int kPanelUnroll = 2;
  static constexpr int64_t kPanelRows = 64;  // with a block of k 256 KiB, half of a small L2
  static constexpr int64_t kDirectTokens = 24;
  // Rows per direct tile by tokens. Three streams of weights measured faster than four or two (Zen
  // 3: a seventh of one token's products from memory, compressed ones too); with three tokens four
  // rows leave no register.
  static constexpr int kRowsPerTokens[5] = {0, 3, 3, 3, 3};
  static constexpr int kLongRowsPerTile = 3;
  static constexpr int kDirectTile = 4;
  static constexpr bool kRowsAdjoin = false;  // no gain (AVX2 on Zen 4)
  static constexpr bool kKeepOrder = true;    // see keep_order
  // Rows per tile of compressed weights that it makes plain itself. Five and six tokens, of stored
  // rows two tiles, are up to a seventh faster in one (Zen 3).
  static constexpr int kCompressedRowsPerTokens[7] = {0, 3, 3, 2, 2, 2, 2};
  static constexpr int kCompressedTile = 6;
  static constexpr int kOutputVectors[7] = {0, 8, 4, 4, 2, 2, 2};
  static constexpr bool kSplitBf16 = true;  // of attention, see DotSplit
  static constexpr bool kAskOnce = true;    // see Ask, InOrder

  HELM_INLINE static F zero() { return _mm256_setzero_ps(); }
  HELM_INLINE static F set1(float v) { return _mm256_set1_ps(v); }
  HELM_INLINE static F load(const float* p) { return _mm256_loadu_ps(p); }
  HELM_INLINE static F load_n(const float* p, int64_t n) { return _mm256_maskload_ps(p, mask(n)); }
  HELM_INLINE static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  HELM_INLINE static void store_n(float* p, F v, int64_t n) { _mm256_maskstore_ps(p, mask(n), v); }

  HELM_INLINE static F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_half(p)); }
  HELM_INLINE static F load_f16_n(const uint16_t* p, int64_t n) {
    return _mm256_cvtph_ps(load_half_n(p, n));
  }
  HELM_INLINE static F load_bf16(const uint16_t* p) { return widen_bf16(load_half(p)); }
  HELM_INLINE static F load_bf16_n(const uint16_t* p, int64_t n) {
    return widen_bf16(load_half_n(p, n));
  }
  // Of sixteen, those at even or at odd places: an operation for each vector, where eight widened
  // in their order take two. (A mask instead of zeros would take a register, or be made each time.)
  HELM_INLINE static F load_bf16_even(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16));
  }
  HELM_INLINE static F load_bf16_odd(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_setzero_si256(), load_words(p), 0xaa));
  }
  // Two vectors in their order become those at even and at odd places; and back.
  HELM_INLINE static void split(F& a, F& b) {
    const F even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd);
    a = in_order(even), b = in_order(odd);
  }
  HELM_INLINE static void join(F& even, F& odd) {
    const F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    even = _mm256_permute2f128_ps(low, high, 0x20);
    odd = _mm256_permute2f128_ps(low, high, 0x31);
  }
  HELM_INLINE static void store_f16(uint16_t* p, F v) { store_half(p, narrow_f16(v)); }
  HELM_INLINE static void store_f16_n(uint16_t* p, F v, int64_t n) {
    store_half_n(p, narrow_f16(v), n);
  }
  HELM_INLINE static void store_bf16(uint16_t* p, F v) { store_half(p, narrow_bf16(v)); }
  HELM_INLINE static void store_bf16_n(uint16_t* p, F v, int64_t n) {
    store_half_n(p, narrow_bf16(v), n);
  }

  HELM_INLINE static F load_i8(const int8_t* p) {
    return widen_i8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  HELM_INLINE static F load_i8_n(const int8_t* p, int64_t n) {
    alignas(16) int8_t tail[16] = {};
    for (int64_t i = 0; i < n; ++i) tail[i] = p[i];
    return widen_i8(_mm_load_si128(reinterpret_cast<const __m128i*>(tail)));
  }
  // Integral lanes of -128 to 127.
  HELM_INLINE static void store_i8_n(int8_t* p, F v, int64_t n) {
    const __m256i e = _mm256_cvtps_epi32(v);
    const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    alignas(16) int8_t bytes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm_packs_epi16(h, h));
    for (int64_t i = 0; i < n; ++i) p[i] = bytes[i];
  }

  HELM_INLINE static F add(F a, F b) { return _mm256_add_ps(a, b); }
  HELM_INLINE static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  HELM_INLINE static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  HELM_INLINE static F div(F a, F b) { return _mm256_div_ps(a, b); }
  HELM_INLINE static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  HELM_INLINE static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  HELM_INLINE static F max(F a, F b) { return _mm256_max_ps(a, b); }
  HELM_INLINE static F min(F a, F b) { return _mm256_min_ps(a, b); }
  HELM_INLINE static F round(F a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // a * 2^n for integral n in [-250, 250], in two steps so that the result may be denormal.
  HELM_INLINE static F scale(F a, F n) {
    const __m256i e = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(e, 1);
    return _mm256_mul_ps(_mm256_mul_ps(a, pow2(half)), pow2(_mm256_sub_epi32(e, half)));
  }

  // out[i] = sum of the lanes of x[i], for multiples of four: (x0 + x2) + (x1 + x3) in each half,
  // then the halves
  template <int N>
  HELM_INLINE static void reduce(const F* x, float* out) {
    constexpr int kEights = N / 8 * 8;
    HELM_UNROLL
    for (int i = 0; i < kEights; i += 8) {
      const F a = add_in_halves(x + i), b = add_in_halves(x + i + 4);
      store(out + i, add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
    }
    if constexpr (N > kEights) {
      const F s = add_in_halves(x + kEights);
      _mm_storeu_ps(out + kEights,
                    _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
  }
  HELM_INLINE static float sum(F a) {
    const F four[4] = {a, a, a, a};
    float out[4];
    reduce<4>(four, out);
    return out[0];
  }
  HELM_INLINE static float max_lane(F a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }

  // The high bytes of a row of compressed.h by code, in each half.
  using HighBytes = __m256i;
  HELM_INLINE static HighBytes high_bytes(uint8_t base) {
    const __m128i codes = _mm_load_si128(reinterpret_cast<const __m128i*>(kHighBytes));
    return _mm256_broadcastsi128_si256(_mm_add_epi8(codes, _mm_set1_epi8(static_cast<char>(base))));
  }
  // Words of bf16, two vectors of them from one of their low bytes and one of codes.
  using Words = __m256i;
  template <int Shift>
  HELM_INLINE static void decompress(const std::byte* codes, const std::byte* low, HighBytes high,
                                     Words (&out)[2]) {
    const __m256i shifted = _mm256_srli_epi16(load_bytes(codes), Shift);
    const __m256i h = _mm256_shuffle_epi8(high, _mm256_and_si256(shifted, _mm256_set1_epi8(0x0f)));
    const __m256i l = load_bytes(low);
    out[0] = _mm256_unpacklo_epi8(l, h), out[1] = _mm256_unpackhi_epi8(l, h);
  }
  HELM_INLINE static void store_words(uint16_t* p, Words v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  // Floats of words that lie as place_of_float says, the first or the second vector; and the words
  // in the order of the weights.
  template <int Half>
  HELM_INLINE static F widen_words(Words v) {
    const __m256i zero = _mm256_setzero_si256();
    return _mm256_castsi256_ps(Half == 0 ? _mm256_unpacklo_epi16(zero, v)
                                         : _mm256_unpackhi_epi16(zero, v));
  }
  HELM_INLINE static Words in_order(Words v) { return _mm256_permute4x64_epi64(v, 0xd8); }

  // Four lanes each to p, p + stride.
  HELM_INLINE static void store_fours(float* p, int64_t stride, F v) {
    _mm_storeu_ps(p, _mm256_castps256_ps128(v));
    _mm_storeu_ps(p + stride, _mm256_extractf128_ps(v, 1));
  }
  // Lane j of x[i] becomes lane i of x[j].
  HELM_INLINE static void transpose(F (&x)[kLanes]) {
    F y[kLanes];
    HELM_UNROLL
    for (int i = 0; i < kLanes; i += 2) {
      y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    HELM_UNROLL
    for (int i = 0; i < kLanes; i += 4) {  // x[i + c], half h: lane 4h + c of rows i to i + 3
      x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
      x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
      x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
      x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    HELM_UNROLL
    for (int c = 0; c < 4; ++c) {
      y[c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x20);
      y[4 + c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x31);
    }
    HELM_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }

 private:
  HELM_INLINE static F in_order(F v) {
    return _mm256_castsi256_ps(in_order(_mm256_castps_si256(v)));
  }
  HELM_INLINE static __m256i load_words(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  HELM_INLINE static __m256i load_bytes(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  // Lane i of each half: the sum of that half of x[i].
  HELM_INLINE static F add_in_halves(const F* x) {
    const F ab = add(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    const F cd = add(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    return add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  }
  HELM_INLINE static __m256i mask(int64_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
  }
  HELM_INLINE static __m256 pow2(__m256i e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  }
  HELM_INLINE static __m128i load_half(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  // AVX2 has no 16-bit masked load, so a tail goes through the stack.
  HELM_INLINE static __m128i load_half_n(const uint16_t* p, int64_t n) {
    alignas(16) uint16_t tail[8] = {};
    for (int64_t i = 0; i < n; ++i) tail[i] = p[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(tail));
  }
  HELM_INLINE static void store_half(uint16_t* p, __m128i v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
  }
  HELM_INLINE static void store_half_n(uint16_t* p, __m128i v, int64_t n) {
    alignas(16) uint16_t tail[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(tail), v);
    for (int64_t i = 0; i < n; ++i) p[i] = tail[i];
  }
  HELM_INLINE static F widen_bf16(__m128i h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  HELM_INLINE static F widen_i8(__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)); }
  HELM_INLINE static __m128i narrow_f16(F v) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  HELM_INLINE static __m128i narrow_bf16(F v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i r = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
};

}  // namespace
}  // namespace helm::cpu
