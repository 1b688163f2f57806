// Four lanes of the compiler's own vectors, in whatever the target's baseline instructions are.
// Knows nothing of the kernels over it.
#pragma once

#include "cpu/kernels/compressed.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

struct VecScalar {
  static constexpr int kLanes = 4;
  using F = float __attribute__((vector_size(4 * kLanes)));

  static constexpr int64_t kBlock = 512;  // k per accumulator, see matmul.h
  static constexpr int kScoreRows = 2;
  static constexpr int kPanelTokens = 4;
  static constexpr int kPanelVectors = 2;
  static constexpr int kPanelLanes = 1;
  static constexpr int kPanelUnroll = 1;
  static constexpr int64_t kPanelRows = 128;
  static constexpr int64_t kDirectTokens = 8;
  static constexpr int kRowsPerTokens[3] = {0, 4, 2};
  static constexpr int kLongRowsPerTile = 4;
  static constexpr int kDirectTile = 2;
  static constexpr bool kRowsAdjoin = false;
  static constexpr bool kKeepOrder = false;
  // Rows per tile of compressed weights that it makes plain itself.
  static constexpr int kCompressedRowsPerTokens[3] = {0, 4, 2};
  static constexpr int kCompressedTile = 2;
  static constexpr int kOutputVectors[7] = {0, 4, 2, 1, 1, 1, 1};
  static constexpr bool kSplitBf16 = false;
  static constexpr bool kAskOnce = false;

  template <class Op>
  HELM_INLINE static F map(Op op) {
    F r{};
    for (int i = 0; i < kLanes; ++i) r[i] = op(i);
    return r;
  }
  HELM_INLINE static F zero() { return F{}; }
  HELM_INLINE static F set1(float v) { return F{v, v, v, v}; }
  HELM_INLINE static F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  HELM_INLINE static F load_n(const float* p, int64_t n) {
    return map([&](int i) { return i < n ? p[i] : 0.0f; });
  }
  HELM_INLINE static void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
  HELM_INLINE static void store_n(float* p, F v, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }

  HELM_INLINE static F load_f16(const uint16_t* p) {
    // As f32_from_f16, whose comments hold here.
    const U h = load_half(p), magnitude = h & 0x7fffu;
    const U finite = reinterpret_cast<U>(reinterpret_cast<F>(magnitude << 13) * 0x1p112f);
    const U value = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : finite;
    return reinterpret_cast<F>((h & 0x8000u) << 16 | value);
  }
  HELM_INLINE static F load_f16_n(const uint16_t* p, int64_t n) {
    return map([&](int i) { return i < n ? f32_from_f16(p[i]) : 0.0f; });
  }
  HELM_INLINE static F load_bf16(const uint16_t* p) {
    return reinterpret_cast<F>(load_half(p) << 16);
  }
  HELM_INLINE static F load_bf16_n(const uint16_t* p, int64_t n) {
    return map([&](int i) { return i < n ? f32_from_bf16(p[i]) : 0.0f; });
  }
  HELM_INLINE static void store_f16(uint16_t* p, F v) { store_f16_n(p, v, kLanes); }
  HELM_INLINE static void store_f16_n(uint16_t* p, F v, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = f16_from_f32(v[i]);
  }
  HELM_INLINE static void store_bf16(uint16_t* p, F v) { store_bf16_n(p, v, kLanes); }
  HELM_INLINE static void store_bf16_n(uint16_t* p, F v, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = bf16_from_f32(v[i]);
  }

  HELM_INLINE static F load_i8(const int8_t* p) {
    return map([&](int i) { return static_cast<float>(p[i]); });
  }
  HELM_INLINE static F load_i8_n(const int8_t* p, int64_t n) {
    return map([&](int i) { return i < n ? static_cast<float>(p[i]) : 0.0f; });
  }
  // Integral lanes of -128 to 127.
  HELM_INLINE static void store_i8_n(int8_t* p, F v, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = static_cast<int8_t>(v[i]);
  }

  HELM_INLINE static F add(F a, F b) { return a + b; }
  HELM_INLINE static F sub(F a, F b) { return a - b; }
  HELM_INLINE static F mul(F a, F b) { return a * b; }
  HELM_INLINE static F div(F a, F b) { return a / b; }
  // a * b + c in two roundings: without FMA hardware the exact form would be a library call.
  HELM_INLINE static F fma(F a, F b, F c) { return a * b + c; }
  // c - a * b
  HELM_INLINE static F fnma(F a, F b, F c) { return c - a * b; }
  // Both return b where either is NaN, as the x86 instructions do.
  HELM_INLINE static F max(F a, F b) { return a > b ? a : b; }
  HELM_INLINE static F min(F a, F b) { return a < b ? a : b; }
  // Adding and removing 1.5 * 2^23 rounds |x| < 2^22 to the nearest integer, ties to even.
  HELM_INLINE static F round(F a) { return (a + 12582912.0f) - 12582912.0f; }
  // a * 2^n for integral n in [-250, 250], in two steps so that the result may be denormal.
  HELM_INLINE static F scale(F a, F n) {
    return map([&](int i) {
      const int32_t e = n[i] == n[i] ? static_cast<int32_t>(n[i]) : 0;
      const int32_t half = e >> 1;
      return a[i] * pow2(half) * pow2(e - half);
    });
  }

  // out[i] = sum of the lanes of x[i] as (x0 + x2) + (x1 + x3)
  template <int N>
  HELM_INLINE static void reduce(const F* x, float* out) {
    for (int i = 0; i < N; ++i) out[i] = sum(x[i]);
  }
  HELM_INLINE static float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  HELM_INLINE static float max_lane(F a) {
    float m = a[0];
    for (int i = 1; i < kLanes; ++i) m = a[i] > m ? a[i] : m;
    return m;
  }

  // The least high byte of a row of compressed.h.
  using HighBytes = uint8_t;
  HELM_INLINE static HighBytes high_bytes(uint8_t base) { return base; }
  // Words of bf16, two vectors of them from one of their low bytes and one of codes.
  struct Words {
    uint16_t x[2 * kLanes];
  };
  template <int Shift>
  HELM_INLINE static void decompress(const std::byte* codes, const std::byte* low, HighBytes base,
                                     Words (&out)[2]) {
    for (int i = 0; i < 4 * kLanes; ++i) {
      const int code = static_cast<uint8_t>(codes[i]) >> Shift;
      const int high = (code & 8) << 4 | (base + (code & 7));
      out[i / (2 * kLanes)].x[i % (2 * kLanes)] =
          static_cast<uint16_t>(high << 8 | static_cast<uint8_t>(low[i]));
    }
  }
  HELM_INLINE static void store_words(uint16_t* p, Words v) {
    __builtin_memcpy(p, v.x, sizeof v.x);
  }
  // Floats of words that lie as place_of_float says, the first or the second vector; and the words
  // in the order of the weights.
  template <int Half>
  HELM_INLINE static F widen_words(Words v) {
    return load_bf16(v.x + Half * kLanes);
  }
  HELM_INLINE static Words in_order(Words v) { return v; }

  HELM_INLINE static void store_fours(float* p, int64_t /*stride*/, F v) { store(p, v); }
  // Lane j of x[i] becomes lane i of x[j].
  HELM_INLINE static void transpose(F (&x)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const float v = x[i][j];
        x[i][j] = x[j][i], x[j][i] = v;
      }
    }
  }

 private:
  using U = uint32_t __attribute__((vector_size(4 * kLanes)));

  HELM_INLINE static U load_half(const uint16_t* p) { return U{p[0], p[1], p[2], p[3]}; }
  HELM_INLINE static float pow2(int32_t e) {
    return f32_from_bits(static_cast<uint32_t>(e + 127) << 23);
  }
};

}  // namespace
}  // namespace helm::cpu
