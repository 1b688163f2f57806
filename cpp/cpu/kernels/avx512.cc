// Kernels of the avx512 tier. The target's compile flags decide whether it exists (cmake/isa.cmake).
#include "cpu/kernels/kernels.h"

#ifdef __AVX512F__
#include "cpu/kernels/table.h"
#include "cpu/kernels/vec_avx512.h"
#endif

namespace helm::cpu {

const KernelTable* kernels_avx512() {
#ifdef __AVX512F__
  static constexpr KernelTable kTable = make_table<VecAvx512>("avx512");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
