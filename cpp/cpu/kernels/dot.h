// One vector of products along k: what a matrix product is made of, for a vector type and the dtype
// of the weights. Knows nothing of tiles.
#pragma once

#include "cpu/kernels/compressed.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

// acc(lane) += sum of A(k) * W(k) over the lane's elements of kStep consecutive ones: its word of
// 32 bits. Operands that meet many others are packed as words. kBlock: of k per accumulator, see
// matmul.h.
template <class Vec, DType D>
struct Dot {
  using V = Vec;
  using F = typename V::F;
  using Store = typename Elem<V, D>::Store;
  using W = F;
  using A = F;
  using Input = float;                // of the few-token product, as it lies in memory
  using Words = Dot<V, DType::kF32>;  // the product over packed words
  static constexpr int64_t kStep = V::kLanes;
  static constexpr int64_t kBlock = V::kBlock;

  HELM_INLINE static W load_w(const Store* p) { return Elem<V, D>::load(p); }
  HELM_INLINE static W load_w_n(const Store* p, int64_t n) { return Elem<V, D>::load_n(p, n); }
  HELM_INLINE static A load_a(const Input* p) { return V::load(p); }
  HELM_INLINE static A load_a_n(const Input* p, int64_t n) { return V::load_n(p, n); }
  // Compressed weights arrive as vectors of bf16, which are so many operands each.
  static constexpr int kPerWords = 2;
  static constexpr Place place(int weight) { return place_of_float<V::kLanes>(weight); }
  template <int I>
  HELM_INLINE static W from_words(typename V::Words v) {
    return V::template widen_words<I>(v);
  }
  // A vector of them in the order of the columns.
  HELM_INLINE static typename V::Words in_order(typename V::Words v) { return V::in_order(v); }
  // Their direct tile at most, and its rows by tokens.
  static constexpr int kCompressedTile = V::kCompressedTile;
  static constexpr const auto& kCompressedRows = V::kCompressedRowsPerTokens;
  HELM_INLINE static F words(F v) { return v; }
  HELM_INLINE static W packed_w(const float* p) { return V::load(p); }
  HELM_INLINE static A packed_a(const float* p) { return V::set1(*p); }
  HELM_INLINE static F fma(W w, A a, F acc) { return V::fma(w, a, acc); }
};

template <class V, DType D>
inline constexpr bool kInPairs = V::kSplitBf16 && D == DType::kBF16;

// The same with bf16 in its pairs: a step takes the elements at even places, then those at odd
// ones. Inputs lie so too, [step][even, odd], padded with zeros to whole steps.
template <class Vec>
struct DotSplit {
  using V = Vec;
  using F = typename V::F;
  using Store = uint16_t;
  struct Pair {
    F even, odd;
  };
  using W = Pair;
  using A = Pair;
  using Input = float;
  static constexpr int64_t kStep = 2 * V::kLanes;

  HELM_INLINE static W load_w(const Store* p) {
    return {V::load_bf16_even(p), V::load_bf16_odd(p)};
  }
  HELM_INLINE static W load_w_n(const Store* p, int64_t n) {
    Store padded[kStep] = {};
    for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
    return load_w(padded);
  }
  HELM_INLINE static A load_a(const Input* p) { return {V::load(p), V::load(p + V::kLanes)}; }
  HELM_INLINE static A load_a_n(const Input* p, int64_t) { return load_a(p); }
  HELM_INLINE static F fma(W w, A a, F acc) {
    return V::fma(w.odd, a.odd, V::fma(w.even, a.even, acc));
  }
  // A row of n inputs in their order, with room for whole steps, becomes what load_a reads.
  static void split_row(float* row, int64_t n) {
    for (int64_t i = n; i < round_up(n, kStep); ++i) row[i] = 0.0f;
    for (int64_t i = 0; i < n; i += kStep) {
      F a = V::load(row + i), b = V::load(row + i + V::kLanes);
      V::split(a, b);
      V::store(row + i, a), V::store(row + i + V::kLanes, b);
    }
  }
};

}  // namespace
}  // namespace helm::cpu
