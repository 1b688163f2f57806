// The scratch of a CUDA stage. One formula for the plugin, which lays it out, and for libhelm,
// whose footprint counts it without the plugin; hence header only.
//
// bytes = tables + blas + narrow + panel + partials, each rounded up to 256, with
//   tables   = what kernels read of a step (cuda/step_tables.h), first: at one place for all stages
//              that share the memory, which have one upload of it in a step; behind that at another
//              for the second sub-batch of a split step, where a plan has several sequences
//   blas     = the workspace of cuBLAS, if a linear op of the stage can have more than
//              kMatvecTokens rows, else 0
//   narrow   = max over such ops with weights of 16 bits or fewer of rows * width(in) * 2, rows =
//              step_tokens or step_outputs as `in` says, and over all ops with packed weights of
//              quantized_bytes(min(rows, kMatvecTokens), width(in)), and over experts ops of
//              rows * chosen * size * 4
//   panel    = max over such ops with packed weights of panel_bytes(their rows, width(in))
//   partials = max over attention and attend ops and step sizes t = 1 .. step_tokens of
//              attention_partials_bytes(t, heads, head_dim, splits), splits = decode_splits(
//              multiprocessors, t, heads, kv_heads, context), t <= sequences, and prompt_splits(
//              prompt_blocks(t, heads, kv_heads), context)
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <variant>

#include "helm/plan.h"

namespace helm::cuda {

inline constexpr int64_t kScratchAlignment = 256;
inline constexpr int64_t kMostBlasBytes = int64_t{32} << 20;  // on any GPU

inline constexpr int64_t kMatvecTokens = 8;  // rows of a product that cuBLAS has no part in
inline constexpr int64_t kSplitKeys = 64;    // ranges end at its multiples, whatever the page size
inline constexpr int64_t kPromptRows = 32;   // (token, query head) pairs of a block of longer runs
// Blocks of the grid of longer runs that occupy the largest GPUs several times over.
inline constexpr int64_t kPromptPieces = 512;
inline constexpr int64_t kMostMultiprocessors = 192;  // of any GPU: a whole GB202

// The input of a product of few tokens with packed weights, in integers.
inline constexpr int64_t kQuantBlockBytes = 48;  // of 32 columns
constexpr int64_t quantized_bytes(int64_t tokens, int64_t cols) {
  return tokens * (format_round_up(cols, kBlockCols) / kBlockCols) * kQuantBlockBytes;
}

// Packed weights as 16-bit elements for cuBLAS: as many rows of the matrix as may be, so that most
// GPUs hold them in their last level of cache and all of one is busy, but at least one strip.
inline constexpr int64_t kMostPanelBytes = int64_t{32} << 20;
constexpr int64_t panel_rows(int64_t bytes, int64_t cols) {
  const int64_t strips = bytes / (cols * kStripRows * int64_t{sizeof(uint16_t)});
  return (strips < 1 ? 1 : strips) * kStripRows;
}
constexpr int64_t panel_bytes(int64_t rows, int64_t cols) {
  const int64_t all = format_round_up(rows, kStripRows), most = panel_rows(kMostPanelBytes, cols);
  return (all < most ? all : most) * cols * int64_t{sizeof(uint16_t)};
}

inline constexpr int64_t kRunBytes = 24;         // of a run in the tables
inline constexpr int64_t kTableAlignment = 16;   // of each table
inline constexpr int64_t kTablesOfAllSteps = 7;  // besides one for each rope table

// Query heads of one KV head that a block has of a run of one token, and how many such blocks a
// multiprocessor holds at once.
constexpr int64_t decode_heads(int64_t group) {
  return group <= 2 ? group : group <= 4 ? 4 : 8;
}
constexpr int decode_residents(int64_t heads) {
  return heads == 1 ? 7 : heads == 2 ? 4 : heads == 4 ? 3 : 2;
}

// Blocks of the grid without splits: of runs of one token each, and of longer ones with `tokens` in
// all, where a block has kPromptRows rows. A plan without attention has no heads.
constexpr int64_t decode_blocks(int64_t runs, int64_t heads, int64_t kv_heads) {
  if (kv_heads == 0) return 0;
  const int64_t group = heads / kv_heads;
  return runs * kv_heads * ((group + decode_heads(group) - 1) / decode_heads(group));
}
constexpr int64_t prompt_blocks(int64_t tokens, int64_t heads, int64_t kv_heads) {
  if (kv_heads == 0) return 0;
  return (tokens * (heads / kv_heads) + kPromptRows - 1) / kPromptRows * kv_heads;
}

// In how many pieces the context of each row is attended, when the longest has `context` positions:
// as many as blocks find room for, each of at least kSplitKeys positions. A short context decides
// by a power of two, so that few shapes are captured while it grows.
constexpr int64_t splits_within(int64_t room, int64_t context) {
  const int64_t most = (context + kSplitKeys - 1) / kSplitKeys;
  if (room <= most) return room < 1 ? 1 : room;
  return most < 1 ? 1 : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(most)));
}

// Of runs of one token: all blocks of the grid are on the GPU at once. With more, some would begin
// when others end, and take as long again.
constexpr int64_t decode_splits(int64_t multiprocessors, int64_t runs, int64_t heads,
                                int64_t kv_heads, int64_t context) {
  if (runs < 1 || kv_heads < 1) return 1;
  const int64_t most =
      multiprocessors < kMostMultiprocessors ? multiprocessors : kMostMultiprocessors;
  const int64_t places = most * decode_residents(decode_heads(heads / kv_heads));
  return splits_within(places / decode_blocks(runs, heads, kv_heads), context);
}

// Of longer runs with so many blocks: a power of two.
constexpr int64_t prompt_splits(int64_t blocks, int64_t context) {
  const int64_t room = kPromptPieces / (blocks < 1 ? 1 : blocks);
  return splits_within(static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(room))), context);
}

constexpr int64_t attention_partials_bytes(int64_t rows, int64_t heads, int64_t head_dim,
                                           int64_t splits) {
  return splits <= 1 ? 0 : rows * heads * splits * (head_dim + 2) * int64_t{sizeof(float)};
}

// The tables of a step, each with room to be aligned; cuda/step_tables.h says what they hold.
inline int64_t step_table_bytes(const Plan& plan) {
  const Limits& limits = plan.limits;
  const int64_t runs = std::min(limits.sequences, limits.step_tokens);
  const int64_t blocks = runs * ((limits.context + plan.kv.page_tokens - 1) / plan.kv.page_tokens);
  int64_t words = 3 * limits.step_tokens + limits.step_outputs + (blocks + 1) * plan.kv.entries();
  for (const RopeTable& table : plan.rope) words += std::ssize(table.inv_freq);
  return words * int64_t{sizeof(int32_t)} + (runs + blocks) * kRunBytes +
         (kTablesOfAllSteps + std::ssize(plan.rope)) * kTableAlignment;
}

// How many steps, or sub-batches, have their tables there at once.
inline int64_t step_table_places(const Limits& limits) {
  return limits.sequences > 1 ? 2 : 1;
}

// Collects what the units of a stage need. Of the plan it reads values, tensors' shapes, limits and
// KV geometry.
class Scratch {
 public:
  // multiprocessors: of the GPU, or kMostMultiprocessors.
  Scratch(const Plan& plan, int64_t blas_bytes, int64_t multiprocessors)
      : plan_(plan),
        multiprocessors_(multiprocessors),
        tables_(step_table_places(plan.limits) * aligned(step_table_bytes(plan))),
        blas_workspace_(blas_bytes) {}

  // format(weight): in which the stage has it.
  template <typename FormatOf>
  void add(const UnitSpec& unit, const FormatOf& format) {
    for (const Op& op : unit.ops) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) add_linear(*linear, format);
      if (const auto* attention = std::get_if<AttentionOp>(&op)) add_attending(*attention);
      if (const auto* experts = std::get_if<ExpertsOp>(&op)) add_experts(*experts);
      if (const auto* attend = std::get_if<AttendOp>(&op)) add_attending(*attend);
    }
  }

  int64_t tables() const { return tables_; }
  int64_t blas() const { return aligned(blas_); }
  int64_t narrow() const { return aligned(narrow_); }
  int64_t panel() const { return aligned(panel_); }
  int64_t partials() const { return aligned(partials_); }
  int64_t bytes() const { return tables() + blas() + narrow() + panel() + partials(); }

 private:
  static int64_t aligned(int64_t bytes) {
    return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  }

  template <typename FormatOf>
  void add_linear(const LinearOp& op, const FormatOf& format) {
    const ValueSpec& in = plan_.values[static_cast<size_t>(op.in)];
    const int64_t rows = in.per_output ? plan_.limits.step_outputs : plan_.limits.step_tokens;
    const int64_t few = std::min(rows, kMatvecTokens);
    const bool many = rows > few;
    if (many) blas_ = blas_workspace_;
    int64_t packed_rows = 0;
    for (const LinearOp::Part& part : op.parts) {
      const Format held = format(part.weight);
      if (held == format_of(DType::kF32)) continue;
      if (many) narrow_ = std::max(narrow_, rows * in.width * int64_t{sizeof(uint16_t)});
      if (!is_packed(held)) continue;
      narrow_ = std::max(narrow_, quantized_bytes(few, in.width));
      packed_rows += plan_.tensors[static_cast<size_t>(part.weight)].rows();
    }
    if (many && packed_rows > 0) panel_ = std::max(panel_, panel_bytes(packed_rows, in.width));
  }

  void add_experts(const ExpertsOp& op) {
    const bool per_output = plan_.values[static_cast<size_t>(op.in)].per_output;
    const int64_t rows = per_output ? plan_.limits.step_outputs : plan_.limits.step_tokens;
    narrow_ = std::max(narrow_, rows * op.chosen * op.size * int64_t{sizeof(float)});
  }

  template <typename Attending>
  void add_attending(const Attending& op) {
    const Limits& limits = plan_.limits;
    const auto add = [&](int64_t rows, int64_t splits) {
      partials_ =
          std::max(partials_, attention_partials_bytes(rows, op.heads, op.head_dim, splits));
    };
    for (int64_t runs = 1; runs <= std::min(limits.sequences, limits.step_tokens); ++runs) {
      const int64_t splits =
          decode_splits(multiprocessors_, runs, op.heads, op.kv_heads, limits.context);
      if (splits == 1) break;
      add(runs, splits);
    }
    // For each number of splits, the largest steps that have as many.
    const int64_t most = prompt_splits(1, limits.context);
    for (int64_t splits = 2; splits <= most; splits *= 2) {
      const int64_t blocks = kPromptPieces / splits / op.kv_heads;  // per KV head
      add(std::min(blocks * kPromptRows / (op.heads / op.kv_heads), limits.step_tokens), splits);
    }
  }

  const Plan& plan_;
  int64_t multiprocessors_;
  int64_t tables_;
  int64_t blas_workspace_;
  int64_t blas_ = 0;
  int64_t narrow_ = 0;
  int64_t panel_ = 0;
  int64_t partials_ = 0;
};

}  // namespace helm::cuda
