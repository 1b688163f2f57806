// Kernels of the avx2 tier. The target's compile flags decide whether it exists (cmake/isa.cmake).
#include "cpu/kernels/kernels.h"

#ifdef __AVX2__
#include "cpu/kernels/table.h"
#include "cpu/kernels/vec_avx2.h"
#endif

namespace helm::cpu {

const KernelTable* kernels_avx2() {
#ifdef __AVX2__
  static constexpr KernelTable kTable = make_table<VecAvx2>("avx2");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
