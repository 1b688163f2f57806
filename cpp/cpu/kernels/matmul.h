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

template <class V, DType D>
void matmul(const MatmulArgs& m) {
  if (m.tokens <= V::kDirectTokens) return direct_product<Dot<V, D>>(m);
  panel_product<Dot<V, D>>(m);
}

}  // namespace
}  // namespace helm::cpu
