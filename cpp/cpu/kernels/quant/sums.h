// How C takes up a block's products, over any vector type of integers.
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
};

}  // namespace
}  // namespace helm::cpu
