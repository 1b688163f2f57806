// The scales and minima of a span as floats, over any vector type: products of all kinds of scales
// are then the same.
#pragma once

#include "cpu/kernels/vec.h"
#include "helm/tiles.h"

namespace helm::cpu {
namespace {

// Bytes within a span of n columns, computed once for all spans of a product.
struct SpanLayout {
  int64_t groups;
  int64_t second;      // the second array of groups
  int64_t span_array;  // f16 d, then e
  int64_t codes;
  int64_t bytes;

  SpanLayout(const Format& format, int64_t n)
      : groups(format.group > 0 ? n / format.group : 1),
        second(format.group > 0 ? group_array_at(format, n, 1) : 0),
        span_array(span_array_at(format, n, 0)),
        codes(block_at(format, n, 0)),
        bytes(span_bytes(format, n)) {}
};

// s and m [groups, 16 rows], see Scales; m is -s z of z and -e n of km.
struct SpanScales {
  const uint8_t* strip;
  const uint8_t* span;
  float* scales;
  float* minima;  // of kinds that have them
};
using ReadScales = void (*)(const SpanLayout& layout, const SpanScales& to);

template <class V, Scales kKind, bool kWide>
void read_scales(const SpanLayout& layout, const SpanScales& to) {
  using F = typename V::F;
  const auto sixteen_bits = [](const uint8_t* array, int64_t i) HELM_LAMBDA_INLINE {
    const auto* halves = reinterpret_cast<const uint16_t*>(array) + i;
    if constexpr (kWide) return V::load_bf16(halves);
    return V::load_f16(halves);
  };
  const uint8_t* second = to.span + layout.second;
  const auto* of_span = reinterpret_cast<const uint16_t*>(to.span + layout.span_array);
  constexpr bool kOfSpan = row_of(kKind).span_f16 > 0;
  HELM_UNROLL
  for (int part = 0; part < kStripRows; part += V::kRows) {
    F d = V::zero(), e = V::zero();
    if constexpr (kOfSpan) d = V::load_f16(of_span + part);
    if constexpr (kKind == Scales::kKM) e = V::load_f16(of_span + kStripRows + part);
    for (int64_t i = part; i < layout.groups * kStripRows; i += kStripRows) {
      F s = V::zero(), m = V::zero();
      if constexpr (kKind == Scales::kR) {
        s = V::load(reinterpret_cast<const float*>(to.strip) + i);
      } else if constexpr (kKind == Scales::kE) {
        s = V::load_e8(to.span + i);
      } else if constexpr (kKind == Scales::kK) {
        s = V::mul(d, V::load_i8(reinterpret_cast<const int8_t*>(to.span + i)));
      } else if constexpr (kKind == Scales::kKM) {
        s = V::mul(d, V::load_u8(to.span + i));
        m = V::fnma(e, V::load_u8(second + i), m);
      } else {
        s = sixteen_bits(to.span, i);
        if constexpr (kKind == Scales::kM) m = sixteen_bits(second, i);
        if constexpr (kKind == Scales::kZ) m = V::fnma(s, V::load_u8(second + i), m);
      }
      V::store(to.scales + i, s);
      if constexpr (row_of(kKind).minimum) V::store(to.minima + i, m);
    }
  }
}

// By Scales, and whether they are wide.
template <class V>
inline constexpr ReadScales kReadScales[kScales][2] = {
    {nullptr, nullptr},
    {read_scales<V, Scales::kS, false>, read_scales<V, Scales::kS, true>},
    {read_scales<V, Scales::kM, false>, read_scales<V, Scales::kM, true>},
    {read_scales<V, Scales::kZ, false>, read_scales<V, Scales::kZ, true>},
    {read_scales<V, Scales::kE, false>, nullptr},
    {read_scales<V, Scales::kK, false>, nullptr},
    {read_scales<V, Scales::kKM, false>, nullptr},
    {read_scales<V, Scales::kR, false>, nullptr}};

}  // namespace
}  // namespace helm::cpu
