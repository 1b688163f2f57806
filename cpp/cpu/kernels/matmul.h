// Matrix product of f32 activations with row-major weights, over any vector type.
//
// Both operands have k contiguous, so C(t, r) is a dot product along memory: vectors run along k
// and nothing is transposed. The order of the arithmetic is the same for every tile shape:
//   k is cut into blocks of P::kBlock; in a block one vector accumulator takes k in order; the
//   block's lanes are summed by V::reduce; C starts as [C] + [bias] and takes the blocks in order.
// So C(t, r) has the same bits however tokens and rows are grouped.
#pragma once

#include "cpu/kernels/matmul_direct.h"
#include "cpu/kernels/matmul_panel.h"

namespace helm::cpu {
namespace {

template <class P, class Weights>
void matmul_of(const MatmulArgs& m, const Weights& w) {
  if (m.tokens <= P::V::kDirectTokens) return direct_product<P>(m, w);
  panel_product<P>(m, w);
}

template <class V, DType D>
void matmul(const MatmulArgs& m) {
  using P = Dot<V, D>;
  using Store = typename P::Store;
  matmul_of<P>(m, StoredWeights<V, Store>{static_cast<const Store*>(m.w), m.cols});
}

// Rows that products want plain at once: those of a packed tile, which are more than a direct one
// has, for one block of k.
template <class P>
constexpr int64_t plain_scratch_bytes() {
  return plain_bytes(kPanelTileRows<typename P::V>, CompressedWeights<P>::kCols);
}

// They lie behind the packed weights.
template <class P>
CompressedWeights<P> compressed_weights(const CompressedMatrix& w, void* scratch) {
  return {w, reinterpret_cast<uint16_t*>(static_cast<char*>(scratch) + panel_scratch_bytes<P>())};
}

// As matmul of the same weights in bf16, bit by bit.
template <class V>
void matmul_compressed(const MatmulArgs& m, const CompressedMatrix& w) {
  using P = Dot<V, DType::kBF16>;
  matmul_of<P>(m, compressed_weights<P>(w, m.scratch));
}

}  // namespace
}  // namespace helm::cpu
