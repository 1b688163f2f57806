// Kernels of the avx512bf16 tier: those of AVX-512, but products with bf16 weights round
// activations to bf16, and attention over bf16 keys and values rounds queries and weights. Keeping
// them exact would take two vdpbf16ps (activation = high + low part) and gain nothing.
#include "cpu/kernels/kernels.h"

#ifdef __AVX512BF16__
#include "cpu/kernels/attention_bf16.h"
#include "cpu/kernels/compress_row.h"
#include "cpu/kernels/matmul.h"
#endif

namespace helm::cpu {

#ifdef __AVX512BF16__
namespace {

int64_t scratch_bytes(int64_t head_dim) {
  return max_of(panel_scratch_bytes<DotBf16>() + plain_scratch_bytes<DotBf16>(),
                kernels_avx512()->scratch_bytes(head_dim));
}

KernelTable bf16_table() {
  KernelTable t = *kernels_avx512();
  constexpr int kBf16 = static_cast<int>(DType::kBF16);
  t.name = "avx512bf16";
  t.scratch_bytes = scratch_bytes;
  t.matmul[kBf16] = matmul_bf16;
  t.matmul_compressed = matmul_compressed_bf16;
  t.compress_row = compress_row<DotBf16>;
  t.compressed_place = DotBf16::place;
  t.read_after_tokens[kBf16] = kDecodeTokens;  // all are bound by memory
  t.pack[kBf16] = pack_tokens<DotBf16>;
  t.attention[kBf16] = attention_bf16;
  t.activations[kBf16] = DType::kBF16;
  return t;
}

}  // namespace
#endif

const KernelTable* kernels_avx512bf16() {
#ifdef __AVX512BF16__
  if (kernels_avx512() == nullptr) return nullptr;  // HELM_TIERS may name this tier alone
  static const KernelTable kTable = bf16_table();
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
