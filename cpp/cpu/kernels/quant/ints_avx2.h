// Integers of eight rows in AVX2. Knows nothing of the kernels over it.
#pragma once

#include "cpu/kernels/vec_avx2.h"

namespace helm::cpu {
namespace {

struct IntsAvx2 : VecAvx2 {
  static constexpr int kRows = 8;
  using I = __m256i;
  using Floats = VecAvx2;
  // Products of bytes come as sums of two in 16 bits, so codes beyond seven bits are made signed.
  static constexpr bool kSigned = true;
  static constexpr int64_t kMostWord = 32767;
  // Strips far apart that a tile of so many tokens computes together, sharing what is broadcast of
  // the tokens. Two streams of weights that are asked for are read faster than four that hardware
  // follows, but for codes of a byte and one token (Zen 3); more than eight sums leave no
  // registers.
  static constexpr int kStripsPerTokens[5] = {0, 2, 2, 1, 1};
  static constexpr int kStripsOfBytes = 4;
  static constexpr int64_t kAheadOfOne = 0;  // bytes asked for ahead, of one token; 0: a span
  static constexpr int kTileTokens = 4;
  static constexpr int kPromptTokens = 4;
  static constexpr int kPromptTileStrips = 1;
  static constexpr int kPromptStrips = 4;

  HELM_INLINE static I load_ints(const uint8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  HELM_INLINE static void store_ints(uint8_t* p, I v) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), v);
  }
  HELM_INLINE static I set4(const int8_t* p) {  // four bytes, in each lane
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  HELM_INLINE static I set1_int(int32_t v) { return _mm256_set1_epi32(v); }
  HELM_INLINE static I set1_byte(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  HELM_INLINE static I no_ints() { return _mm256_setzero_si256(); }
  HELM_INLINE static I bits_and(I a, I b) { return _mm256_and_si256(a, b); }
  HELM_INLINE static I bits_or(I a, I b) { return _mm256_or_si256(a, b); }
  HELM_INLINE static I bits_xor(I a, I b) { return _mm256_xor_si256(a, b); }
  // Of 16 bits, to the left if N > 0.
  template <int N>
  HELM_INLINE static I shift_words(I a) {
    if constexpr (N > 0) return _mm256_slli_epi16(a, N);
    if constexpr (N < 0) return _mm256_srli_epi16(a, -N);
    return a;
  }
  HELM_INLINE static I words_down(I a, int n) { return _mm256_srl_epi16(a, _mm_cvtsi32_si128(n)); }
  template <int N>
  HELM_INLINE static I shift_left(I a) {
    return _mm256_slli_epi32(a, N);
  }
  HELM_INLINE static I add_ints(I a, I b) { return _mm256_add_epi32(a, b); }
  HELM_INLINE static I sub_ints(I a, I b) { return _mm256_sub_epi32(a, b); }
  HELM_INLINE static F float_of(I a) { return _mm256_cvtepi32_ps(a); }
  // table[16] by bytes of 0 to 15
  HELM_INLINE static I look_up(const int8_t* table, I a) {
    const __m128i t = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), a);
  }
  HELM_INLINE static F load_u8(const uint8_t* p) {
    return float_of(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // 2^(e - 128)
  HELM_INLINE static F load_e8(const uint8_t* p) {
    const I e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const I normal = _mm256_slli_epi32(_mm256_sub_epi32(e, set1_int(1)), 23);
    const I denormal = _mm256_sllv_epi32(set1_int(0x00200000), e);
    return _mm256_castsi256_ps(
        _mm256_blendv_epi8(normal, denormal, _mm256_cmpgt_epi32(set1_int(2), e)));
  }

  // What a sum multiplies: bytes of the weights, unsigned, or with their absolute values.
  template <bool Signed>
  struct Bytes {
    I w, absolute;
    HELM_INLINE explicit Bytes(I bytes) : w(bytes), absolute(bytes) {
      if constexpr (Signed) absolute = _mm256_abs_epi8(bytes);
    }
  };
  // The sum of N products of four bytes each. Of unsigned bytes up to kMost, as many are added in
  // 16 bits as fit there; signed ones have |w| <= 128. What is done next to a sum stays behind its
  // barrier: compilers move all multiplications before the additions, and sums to the stack.
  template <bool Signed, int kMost, int N>
  struct Sum {
    static constexpr int kDeep = Signed ? 1 : min_of(N, kMostWord / (2 * 127 * kMost) / 2 * 2);
    static constexpr bool kTwo = kDeep > 1 && kDeep < N;  // both are needed at once
    I words, total;

    HELM_INLINE void begin(I start) { total = start; }
    template <int Which>
    HELM_INLINE void add(const Bytes<Signed>& w, I a) {
      if constexpr (Signed) a = _mm256_sign_epi8(a, w.w);
      const I pairs = _mm256_maddubs_epi16(w.absolute, a);
      words = Which % kDeep == 0 ? pairs : _mm256_add_epi16(words, pairs);
      barrier(words);
      if constexpr (Which % kDeep == kDeep - 1) {
        const I some = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
        total = add_ints(total, some);
        if constexpr (N > kDeep) barrier(total);
      }
    }
  };

  HELM_INLINE static void barrier(I& v) { __asm__ volatile("" : "+x"(v)); }
};

}  // namespace
}  // namespace helm::cpu
