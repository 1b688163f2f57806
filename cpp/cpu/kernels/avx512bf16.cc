// Kernels of the avx512bf16 tier: AVX-512 plus the bf16 instructions.
#include "cpu/kernels/kernels.h"

#ifdef __AVX512BF16__
#include "cpu/kernels/table.h"
#include "cpu/kernels/vec_avx512.h"
#endif

namespace helm::cpu {

const KernelTable* kernels_avx512bf16() {
#ifdef __AVX512BF16__
  static constexpr KernelTable kTable = make_table<VecAvx512>("avx512bf16");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
