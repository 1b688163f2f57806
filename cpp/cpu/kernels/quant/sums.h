// C of a strip's rows in registers: before a span, after a block's products, and after the span.
// Over any vector type of integers.
#pragma once

#include "cpu/kernels/quant/operands.h"
#include "cpu/kernels/quant/span.h"

namespace helm::cpu {
namespace {

template <class V, Kind K>
struct Sums {
  using F = typename V::F;
  using I = typename V::I;
  using Op = Operands<V, K.codes>;
  static constexpr int P = kStripRows / V::kRows;  // vectors side by side in a strip
  static constexpr int kOffset = K.offset + Op::kPlus;

  // What a block's products, or those of one of its halves, are short of; the same for all rows.
  template <int kHalf>
  HELM_INLINE static I offset_of(const QuantBlock& block) {
    constexpr int kShift = log2_of(kOffset > 0 ? kOffset : -kOffset);
    static_assert(kOffset == 0 || 1 << kShift == (kOffset > 0 ? kOffset : -kOffset));
    const int32_t minus = K.halves ? block.minus_sums[kHalf] : block.minus_sum;
    const I times = V::template shift_left<kShift>(V::set1_int(minus));
    return kOffset > 0 ? times : V::sub_ints(V::no_ints(), times);
  }
  // C takes up the sum of a block, or of one of its halves.
  template <int kHalf>
  HELM_INLINE static F add(F c, I total, const float* scales, const float* minima, int64_t place,
                           const QuantBlock& block) {
    const F v = V::float_of(total);
    c = V::fma(v, V::mul(V::load(scales + place), V::set1(block.alpha)), c);
    if constexpr (!K.minimum) return c;
    const F x = V::set1(K.halves ? block.alpha_sums[kHalf] : block.alpha_sum);
    return V::fma(V::load(minima + place), x, c);
  }

  // C before a span, of the first [C] + [bias], zeros beyond the last row;
  HELM_INLINE static void begin(const QuantArgs& m, bool first_span, int64_t token, int64_t strip,
                                F (&v)[P]) {
    const int64_t first = strip * kStripRows;
    const float* c = m.c + token * m.c_stride + first;
    float some[kStripRows];
    if (first + kStripRows > m.rows) {
      begin_rows(m, first_span, token, first, some);
      c = some, first_span = false;
    }
    const bool from_zero = first_span && !m.accumulate;
    const float* bias = first_span && m.bias != nullptr ? m.bias + first : nullptr;
    HELM_UNROLL
    for (int p = 0; p < P; ++p) {
      v[p] = from_zero ? V::set1(0.0f) : V::load(c + p * V::kRows);
      if (bias != nullptr) {
        const F b = V::load(bias + p * V::kRows);
        v[p] = from_zero ? b : V::add(v[p], b);
      }
    }
  }
  // and after it.
  HELM_INLINE static void end(const QuantArgs& m, int64_t token, int64_t strip, const F (&v)[P]) {
    const int64_t first = strip * kStripRows, n = min_of(kStripRows, m.rows - first);
    float* c = m.c + token * m.c_stride + first;
    float some[kStripRows];
    HELM_UNROLL
    for (int p = 0; p < P; ++p) V::store((n == kStripRows ? c : some) + p * V::kRows, v[p]);
    if (n < kStripRows) __builtin_memcpy(c, some, static_cast<size_t>(n) * sizeof(float));
  }
};

}  // namespace
}  // namespace helm::cpu
