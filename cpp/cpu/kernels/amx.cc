// Kernels of the amx tier: those of avx512bf16, with products of bf16 weights in tile registers.
// One token too, which is bound by memory in any instructions: so its bits are those of a prompt.
#include "cpu/kernels/kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HELM_HAS_AMX
#include "cpu/kernels/amx_tiles.h"
#include "cpu/kernels/matmul_tiles.h"
#endif

namespace helm::cpu {

#ifdef HELM_HAS_AMX
namespace {

int64_t scratch_bytes(int64_t head_dim) {
  return max_of(kCompressedTileScratchBytes<DotBf16>,
                kernels_avx512bf16()->scratch_bytes(head_dim));
}

KernelTable amx_table() {
  KernelTable t = *kernels_avx512bf16();
  t.name = "amx";
  t.scratch_bytes = scratch_bytes;
  t.matmul[static_cast<int>(DType::kBF16)] = matmul_in_tiles<AmxTiles, VecAvx512>;
  t.matmul_compressed = matmul_compressed_in_tiles<AmxTiles, DotBf16>;
  t.direct_tokens[static_cast<int>(DType::kBF16)] = INT64_MAX;
  return t;
}

}  // namespace
#endif

const KernelTable* kernels_amx() {
#ifdef HELM_HAS_AMX
  if (kernels_avx512bf16() == nullptr) return nullptr;  // HELM_TIERS may name this tier alone
  static const KernelTable kTable = amx_table();
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
