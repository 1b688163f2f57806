// Kernels of the avx512bf16 tier: those of AVX-512, but products with bf16 weights round
// activations to bf16, and attention over bf16 keys and values rounds queries and weights. Keeping
// them exact would take two vdpbf16ps (activation = high + low part) and gain nothing.
#include "cpu/kernels/kernels.h"

#ifdef __AVX512BF16__
#include "cpu/kernels/attention_bf16.h"
#include "cpu/kernels/table.h"
#endif

namespace helm::cpu {

#ifdef __AVX512BF16__
namespace {

constexpr KernelTable bf16_table() {
  KernelTable t = make_table<VecAvx512>("avx512bf16");
  constexpr int kBf16 = static_cast<int>(DType::kBF16);
  static_assert(panel_scratch_bytes<DotBf16>() >=
                panel_scratch_bytes<Dot<VecAvx512, DType::kF32>>());
  t.scratch_bytes = scratch_bytes<VecAvx512, DotBf16>;
  t.matmul[kBf16] = matmul_bf16;
  t.matmul_compressed = matmul_compressed_bf16;
  t.compress_row = compress_row<DotBf16>;
  t.compressed_place = DotBf16::place;
  t.pack[kBf16] = pack_tokens<DotBf16>;
  t.attention[kBf16] = attention_bf16;
  t.activations[kBf16] = DType::kBF16;
  return t;
}

}  // namespace
#endif

const KernelTable* kernels_avx512bf16() {
#ifdef __AVX512BF16__
  static constexpr KernelTable kTable = bf16_table();
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
