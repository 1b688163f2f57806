// Integers of four rows in the compiler's own vectors. Knows nothing of the kernels over it.
#pragma once

#include "cpu/kernels/vec_scalar.h"

namespace helm::cpu {
namespace {

struct IntsScalar : VecScalar {
  static constexpr int kRows = 4;
  using I = int32_t __attribute__((vector_size(16)));
  using Floats = VecScalar;
  static constexpr bool kSigned = false;
  static constexpr int kStripsPerTokens[2] = {0, 1};
  static constexpr int kStripsOfBytes = 1;
  static constexpr int64_t kAheadOfOne = 1024;
  static constexpr int kTileTokens = 1;
  static constexpr int kPromptTokens = 1;
  static constexpr int kPromptTileStrips = 1;
  static constexpr int kPromptStrips = 4;

  // Rounded once, as by all other tables: a library call without FMA hardware.
  HELM_INLINE static F fma(F a, F b, F c) {
    return map([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
  }
  HELM_INLINE static F fnma(F a, F b, F c) { return fma(-a, b, c); }

  HELM_INLINE static I load_ints(const uint8_t* p) {
    I v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  HELM_INLINE static void store_ints(uint8_t* p, I v) { __builtin_memcpy(p, &v, sizeof v); }
  HELM_INLINE static I set4(const int8_t* p) {  // four bytes, in each lane
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return set1_int(four);
  }
  HELM_INLINE static I set1_int(int32_t v) { return I{v, v, v, v}; }
  HELM_INLINE static I set1_byte(int v) { return set1_int((v & 0xff) * 0x01010101); }
  HELM_INLINE static I no_ints() { return I{}; }
  HELM_INLINE static I bits_and(I a, I b) { return a & b; }
  HELM_INLINE static I bits_or(I a, I b) { return a | b; }
  HELM_INLINE static I bits_xor(I a, I b) { return a ^ b; }
  // Of 16 bits, to the left if N > 0.
  template <int N>
  HELM_INLINE static I shift_words(I a) {
    using Words = uint16_t __attribute__((vector_size(16)));
    const Words w = reinterpret_cast<Words>(a);
    if constexpr (N > 0) return reinterpret_cast<I>(w << N);
    if constexpr (N < 0) return reinterpret_cast<I>(w >> -N);
    return a;
  }
  HELM_INLINE static I words_down(I a, int n) {
    using Words = uint16_t __attribute__((vector_size(16)));
    return reinterpret_cast<I>(reinterpret_cast<Words>(a) >> static_cast<uint16_t>(n));
  }
  template <int N>
  HELM_INLINE static I shift_left(I a) {
    return a * (1 << N);
  }
  HELM_INLINE static I add_ints(I a, I b) { return a + b; }
  HELM_INLINE static I sub_ints(I a, I b) { return a - b; }
  HELM_INLINE static F float_of(I a) { return __builtin_convertvector(a, F); }
  // table[16] by bytes of 0 to 15
  HELM_INLINE static I look_up(const int8_t* table, I a) {
    int8_t bytes[16];
    __builtin_memcpy(bytes, &a, sizeof bytes);
    for (int8_t& b : bytes) b = table[b];
    return load_ints(reinterpret_cast<const uint8_t*>(bytes));
  }
  HELM_INLINE static F load_u8(const uint8_t* p) {
    return map([&](int i) { return static_cast<float>(p[i]); });
  }
  // 2^(e - 128)
  HELM_INLINE static F load_e8(const uint8_t* p) {
    return map([&](int i) {
      const uint32_t e = p[i];
      return f32_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    });
  }

  HELM_INLINE static void barrier(I& v) { __asm__ volatile("" : "+m"(v)); }

  template <bool Signed>
  struct Bytes {
    I w;
    HELM_INLINE explicit Bytes(I from) : w(from) {}
  };
  // The sum of N products of four bytes each.
  template <bool Signed, int kMost, int N>
  struct Sum {
    static constexpr bool kTwo = false;  // see IntsAvx2
    I total;

    HELM_INLINE void begin(I start) { total = start; }
    template <int Which>
    HELM_INLINE void add(const Bytes<Signed>& w, I a) {
      HELM_UNROLL
      for (int b = 0; b < 4; ++b) total += (w.w >> 8 * b & 0xff) * (a << (24 - 8 * b) >> 24);
    }
  };
};

}  // namespace
}  // namespace helm::cpu
