// One vector of products along k: what a matrix product is made of, for a vector type and the dtype
// of the weights. Knows nothing of tiles.
#pragma once

#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

// acc(lane) += sum of A(k) * W(k) over the lane's elements of kStep consecutive ones. Activations
// that meet many rows of weights are packed as Packed. kBlock: of k per accumulator, see matmul.h.
// kPanelBytes: of packed weights that stay in L2 while all tokens pass.
template <class Vec, DType D>
struct Dot {
  using V = Vec;
  using F = typename V::F;
  using Store = typename Elem<V, D>::Store;
  using W = F;
  using A = F;
  using Input = float;  // of the few-token product, as it lies in memory
  using Packed = float;
  static constexpr int64_t kStep = V::kLanes;
  static constexpr int64_t kBlock = V::kBlock;
  static constexpr int64_t kPanelBytes = int64_t{256} << 10;  // a quarter of a recent core's L2

  HELM_INLINE static W load_w(const Store* p) { return Elem<V, D>::load(p); }
  HELM_INLINE static W load_w_n(const Store* p, int64_t n) { return Elem<V, D>::load_n(p, n); }
  HELM_INLINE static A load_a(const Input* p) { return V::load(p); }
  HELM_INLINE static A load_a_n(const Input* p, int64_t n) { return V::load_n(p, n); }
  HELM_INLINE static A load_packed(const Packed* p) { return V::load(p); }
  HELM_INLINE static void store_packed(Packed* p, A a) { V::store(p, a); }
  HELM_INLINE static F fma(W w, A a, F acc) { return V::fma(w, a, acc); }
};

}  // namespace
}  // namespace helm::cpu
