// How the scratch of a stage is laid out in the memory of the GPU, and how attention is split: what
// the planner has to count.
//
// bytes = steps + blas + narrow + partials, each rounded up to 256, with
//   steps    = StepLayout::bytes (cuda/step_tables.h), first: at one place for all stages that
//   share
//              the memory, which have one upload of it in a step
//   blas     = 32 MiB (compute capability 9.0 and newer) or 8 MiB, if a linear op of the stage can
//              have more than kMatvecTokens rows, else 0
//   narrow   = max over such ops with 16-bit weights of rows * width(in) * 2,
//              rows = step_tokens or step_outputs as `in` says
//   partials = max over attention and attend ops and step sizes t = 1 .. step_tokens of
//              attention_partials_bytes(t, heads, head_dim, splits), splits = attention_splits(
//              blocks, context) with blocks = decode_blocks(t, kv_heads), t <= sequences, and
//              prompt_blocks(t, heads, kv_heads); t * splits <= 512 * 32 / heads, or step_tokens
#pragma once

#include <bit>
#include <cstdint>
#include <span>

#include "cuda/kernels/kernels.h"
#include "helm/plan.h"

namespace helm::cuda {

struct WorkspaceLayout {
  WorkspaceLayout(const Plan& plan, std::span<const UnitSpec> units, int64_t blas_workspace);

  int64_t blas_offset;  // behind the step's tables
  int64_t blas_bytes;
  int64_t narrow_offset;    // inputs of products narrowed to the weights' dtype
  int64_t partials_offset;  // of attention
  int64_t bytes;            // in all
};

// Blocks of the grid that occupy the largest GPUs (132 to 170 multiprocessors) several times over.
inline constexpr int64_t kAttentionPieces = 512;

// Blocks of the grid without splits: of runs of one token each, and of longer ones with `tokens` in
// all, where a block has kPromptRows rows. A plan without attention has no heads.
constexpr int64_t decode_blocks(int64_t runs, int64_t kv_heads) {
  return runs * kv_heads;
}
constexpr int64_t prompt_blocks(int64_t tokens, int64_t heads, int64_t kv_heads) {
  if (kv_heads == 0) return 0;
  return (tokens * (heads / kv_heads) + kPromptRows - 1) / kPromptRows * kv_heads;
}

// In how many pieces the context of each row is attended, when the longest has `context` positions:
// a power of two, so that few shapes are captured, enough to occupy the GPU where blocks are few,
// each of at least kSplitKeys positions.
constexpr int64_t attention_splits(int64_t blocks, int64_t context) {
  const int64_t wanted = kAttentionPieces / (blocks < 1 ? 1 : blocks);
  const int64_t most = (context + kSplitKeys - 1) / kSplitKeys;
  const int64_t splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(splits)));
}

}  // namespace helm::cuda
