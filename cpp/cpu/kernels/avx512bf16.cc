// Kernels of the avx512bf16 tier. They are those of AVX-512, by measurement: vdpbf16ps does two
// products per lane, but keeping f32 accuracy takes two of them (activation = high + low bf16
// part). On Zen 4 it issues as often as an f32 FMA (117 against 59 G products/s), so the pair gains
// nothing, and it flushes denormals. The tier stays apart for kernels that may round activations to
// bf16.
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
