// Integers of sixteen rows in AVX-512 with VNNI's dot products. Knows nothing of the kernels over
// it.
#pragma once

#include "cpu/kernels/vec_avx512.h"

namespace helm::cpu {
namespace {

struct IntsAvx512Vnni : VecAvx512 {
  static constexpr int kRows = 16;
  using I = __m512i;
  using Floats = VecAvx512;
  static constexpr bool kSigned = false;
  // See IntsAvx2: half as many vectors per strip, and twice the registers. One token: Zen 5 reads a
  // fifth more from two streams that are asked for far ahead than from four that run by themselves.
  static constexpr int kStripsPerTokens[5] = {0, 2, 4, 2, 2};
  static constexpr int kStripsOfBytes = 2;
  static constexpr int64_t kAheadOfOne = 4096;
  static constexpr int kTileTokens = 4;
  static constexpr int kPromptTokens = 6;
  static constexpr int kPromptTileStrips = 2;
  static constexpr int kPromptStrips = 2;

  HELM_INLINE static I load_ints(const uint8_t* p) { return _mm512_load_si512(p); }
  HELM_INLINE static void store_ints(uint8_t* p, I v) { _mm512_store_si512(p, v); }
  HELM_INLINE static I set4(const int8_t* p) {  // four bytes, in each lane
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  HELM_INLINE static I set1_int(int32_t v) { return _mm512_set1_epi32(v); }
  HELM_INLINE static I set1_byte(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  HELM_INLINE static I no_ints() { return _mm512_setzero_si512(); }
  HELM_INLINE static I bits_and(I a, I b) { return _mm512_and_si512(a, b); }
  HELM_INLINE static I bits_or(I a, I b) { return _mm512_or_si512(a, b); }
  HELM_INLINE static I bits_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  // Of 16 bits, to the left if N > 0.
  template <int N>
  HELM_INLINE static I shift_words(I a) {
    if constexpr (N > 0) return _mm512_slli_epi16(a, N);
    if constexpr (N < 0) return _mm512_srli_epi16(a, -N);
    return a;
  }
  HELM_INLINE static I words_down(I a, int n) { return _mm512_srl_epi16(a, _mm_cvtsi32_si128(n)); }
  template <int N>
  HELM_INLINE static I shift_left(I a) {
    return _mm512_slli_epi32(a, N);
  }
  HELM_INLINE static I add_ints(I a, I b) { return _mm512_add_epi32(a, b); }
  HELM_INLINE static I sub_ints(I a, I b) { return _mm512_sub_epi32(a, b); }
  HELM_INLINE static F float_of(I a) { return _mm512_cvtepi32_ps(a); }
  // table[16] by bytes of 0 to 15
  HELM_INLINE static I look_up(const int8_t* table, I a) {
    const __m128i t = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), a);
  }
  HELM_INLINE static F load_u8(const uint8_t* p) {
    return float_of(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // 2^(e - 128)
  HELM_INLINE static F load_e8(const uint8_t* p) {
    const I e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const I normal = _mm512_slli_epi32(_mm512_sub_epi32(e, set1_int(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(
        normal, _mm512_cmplt_epi32_mask(e, set1_int(2)), set1_int(0x00200000), e));
  }

  HELM_INLINE static void barrier(I& v) { __asm__ volatile("" : "+v"(v)); }

  template <bool Signed>
  struct Bytes {
    I w;
    HELM_INLINE explicit Bytes(I bytes) : w(bytes) {}
  };
  // The sum of N products of four bytes each.
  template <bool Signed, int kMost, int N>
  struct Sum {
    static constexpr bool kTwo = false;  // see IntsAvx2
    I total;

    HELM_INLINE void begin(I start) { total = start; }
    template <int Which>
    HELM_INLINE void add(const Bytes<Signed>& w, I a) {
      total = _mm512_dpbusd_epi32(total, w.w, a);
    }
  };
};

}  // namespace
}  // namespace helm::cpu
