// Kernels of the baseline tier, in the target's default instructions.
#include "cpu/kernels/table.h"
#include "cpu/kernels/vec_scalar.h"

namespace helm::cpu {

const KernelTable* kernels_scalar() {
  static constexpr KernelTable kTable = make_table<VecScalar>("scalar");
  return &kTable;
}

}  // namespace helm::cpu
