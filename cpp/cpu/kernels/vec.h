// What all vector types share: scalar conversions, element access by dtype, exp.
// Everything here has internal linkage: an inline copy compiled for one ISA must never be picked
// by the linker for another.
#pragma once

#include <stdint.h>

#include "helm/types.h"

#ifdef HELM_NO_INLINE  // quickly compiled, slow
#define HELM_INLINE inline
#define HELM_LAMBDA_INLINE
#else
#define HELM_INLINE inline __attribute__((always_inline))
#define HELM_LAMBDA_INLINE __attribute__((always_inline))
#endif
#if defined(HELM_NO_UNROLL)
#define HELM_UNROLL
#elif defined(__clang__)
#define HELM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HELM_UNROLL _Pragma("GCC unroll 32")
#endif

namespace helm::cpu {
namespace {

inline constexpr int64_t kLineBytes = 64;  // of every cache

// Between two steps along k: the loads of the next stay behind the sums of this one. Where sums
// take most of sixteen registers, compilers move loads ahead and a sum to the stack in their place,
// or not, from one build to the next.
template <class V>
HELM_INLINE void keep_order() {
  if constexpr (V::kKeepOrder) __asm__ volatile("" ::: "memory");
}

// v, which several sums take, is loaded once: compilers fold the load into each of them, and a core
// loads no more vectors than it multiplies (Zen 3: up to a tenth for four tokens).
template <class V, class T>
HELM_INLINE void load_once(T& v) {
  if constexpr (V::kKeepOrder) __asm__("" : "+x"(v));
}

HELM_INLINE float f32_from_bits(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
HELM_INLINE uint32_t bits_from_f32(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

HELM_INLINE float f32_from_bf16(uint16_t h) {
  return f32_from_bits(static_cast<uint32_t>(h) << 16);
}

HELM_INLINE uint16_t bf16_from_f32(float f) {
  const uint32_t u = bits_from_f32(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);  // quiet NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

HELM_INLINE float f32_from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return f32_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Moving the fields and multiplying by 2^112 rebiases the exponent, denormals included.
  const float f = f32_from_bits(magnitude << 13) * 0x1p112f;
  return f32_from_bits(sign | bits_from_f32(f));
}

HELM_INLINE uint16_t f16_from_f32(float f) {
  const uint32_t u = bits_from_f32(f);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  }
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // from 65520 on the nearest is infinity
  if (magnitude < 0x38800000u) {                        // denormal: units of 2^-24 by adding 0.5
    const float shifted = f32_from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_from_f32(shifted) - bits_from_f32(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Vector access to element i of an array of type D.
template <class V, DType D>
struct Elem;

template <class V>
struct Elem<V, DType::kF32> {
  using F = typename V::F;
  using Store = float;
  HELM_INLINE static F load(const Store* p) { return V::load(p); }
  HELM_INLINE static F load_n(const Store* p, int64_t n) { return V::load_n(p, n); }
  HELM_INLINE static void store(Store* p, F v) { V::store(p, v); }
  HELM_INLINE static void store_n(Store* p, F v, int64_t n) { V::store_n(p, v, n); }
};

template <class V>
struct Elem<V, DType::kF16> {
  using F = typename V::F;
  using Store = uint16_t;
  HELM_INLINE static F load(const Store* p) { return V::load_f16(p); }
  HELM_INLINE static F load_n(const Store* p, int64_t n) { return V::load_f16_n(p, n); }
  HELM_INLINE static void store(Store* p, F v) { V::store_f16(p, v); }
  HELM_INLINE static void store_n(Store* p, F v, int64_t n) { V::store_f16_n(p, v, n); }
};

template <class V>
struct Elem<V, DType::kBF16> {
  using F = typename V::F;
  using Store = uint16_t;
  HELM_INLINE static F load(const Store* p) { return V::load_bf16(p); }
  HELM_INLINE static F load_n(const Store* p, int64_t n) { return V::load_bf16_n(p, n); }
  HELM_INLINE static void store(Store* p, F v) { V::store_bf16(p, v); }
  HELM_INLINE static void store_n(Store* p, F v, int64_t n) { V::store_bf16_n(p, v, n); }
};

// The integers; their scale is applied elsewhere.
template <class V>
struct Elem<V, DType::kI8> {
  using F = typename V::F;
  using Store = int8_t;
  HELM_INLINE static F load(const Store* p) { return V::load_i8(p); }
  HELM_INLINE static F load_n(const Store* p, int64_t n) { return V::load_i8_n(p, n); }
  HELM_INLINE static void store(Store* p, F v) { V::store_i8_n(p, v, V::kLanes); }
  HELM_INLINE static void store_n(Store* p, F v, int64_t n) { V::store_i8_n(p, v, n); }
};

// body(i, load, store) for every vector of n elements; the last may be partial.
template <class V, class Body>
HELM_INLINE void for_vectors(int64_t n, Body body) {
  using F = typename V::F;
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    body(
        i, [](const float* p) HELM_LAMBDA_INLINE { return V::load(p); },
        [](float* p, F v) HELM_LAMBDA_INLINE { V::store(p, v); });
  }
  if (i < n) {
    const int64_t rest = n - i;
    body(
        i, [rest](const float* p) HELM_LAMBDA_INLINE { return V::load_n(p, rest); },
        [rest](float* p, F v) HELM_LAMBDA_INLINE { V::store_n(p, v, rest); });
  }
}

// exp(x) = 2^n (1 + more)
template <class V>
struct ExpParts {
  typename V::F n, more;
};

// Of x that is NaN or from -104 to 89.
template <class V>
HELM_INLINE ExpParts<V> exp_parts(typename V::F x) {
  using F = typename V::F;
  const F n = V::round(V::mul(x, V::set1(1.44269504088896341f)));
  F r = V::fnma(n, V::set1(0.693359375f), x);  // Cody and Waite: n * high part is exact
  r = V::fnma(n, V::set1(-2.12194440e-4f), r);
  F p = V::set1(1.9875691500e-4f);  // Cephes minimax of (e^r - 1 - r) / r^2 on +-ln2/2
  p = V::fma(p, r, V::set1(1.3981999507e-3f));
  p = V::fma(p, r, V::set1(8.3334519073e-3f));
  p = V::fma(p, r, V::set1(4.1665795894e-2f));
  p = V::fma(p, r, V::set1(1.6666665459e-1f));
  p = V::fma(p, r, V::set1(5.0000001201e-1f));
  return {n, V::fma(V::mul(r, r), p, r)};
}

// exp(x) within 2 ulp; -inf and below -104 give 0, above 88.73 inf, NaN stays NaN.
template <class V>
HELM_INLINE typename V::F exp(typename V::F x) {
  x = V::min(V::set1(89.0f), V::max(V::set1(-104.0f), x));  // second operand wins for NaN
  const ExpParts<V> e = exp_parts<V>(x);
  return V::scale(V::add(e.more, V::set1(1.0f)), e.n);
}

// cap * tanh(x / cap) for cap > 0: with e = exp(2 x / cap) - 1 it is cap * e / (e + 2). e keeps its
// digits where x is small. NaN stays NaN.
template <class V>
HELM_INLINE typename V::F softcap(typename V::F x, float cap) {
  using F = typename V::F;
  const F u = V::mul(x, V::set1(2.0f / cap));
  const ExpParts<V> p = exp_parts<V>(V::min(V::set1(40.0f), V::max(V::set1(-40.0f), u)));
  const F power = V::scale(V::set1(1.0f), p.n);
  const F e = V::fma(p.more, power, V::sub(power, V::set1(1.0f)));
  return V::div(V::mul(V::set1(cap), e), V::add(e, V::set1(2.0f)));
}

HELM_INLINE constexpr int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
HELM_INLINE constexpr int64_t max_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}
HELM_INLINE constexpr int64_t round_up(int64_t a, int64_t b) {
  return (a + b - 1) / b * b;
}

}  // namespace
}  // namespace helm::cpu
