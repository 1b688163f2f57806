// The contract between the CUDA stage and its kernels: one launch function per op. Each enqueues on
// the stream and returns at once; launch failures surface through cudaGetLastError. Knows nothing
// of plans, graphs or pools. All pointers are device memory; activations are f32.
//
// Everything that changes from step to step with the shape kept (token ids, positions, pages,
// contexts) is read from StepTables in device memory, never passed by value: a captured launch can
// be replayed for every step of that shape.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/hardware/queue.h"
#include "helm/plan.h"
#include "plan/cuda_scratch.h"

namespace helm::cuda {

// One sequence's rows in a step and those of its blocks that have pages; see helm::SequenceRun.
struct Run {
  int32_t first_row;
  int32_t tokens;
  int32_t first_position;
  // Index into StepTables::pages of the first KV entry in block 0. There is no such entry, and
  // the index may be negative, where first_block is a later one.
  int32_t first_page;
  int32_t first_block;
  int32_t end_block;  // one past the last
};

// One step, as the stage uploads it.
struct StepTables {
  const int32_t* token_ids;    // [tokens]
  const int32_t* positions;    // [tokens]
  const int32_t* output_rows;  // [outputs]
  const int32_t* row_runs;     // [tokens], the run that a row belongs to, where there are several;
                               // -1: none
  const Run* runs;             // [runs]
  const int32_t* pages;        // [runs][blocks, entries]
  int32_t entries;             // KV entries: the stride from block to block
};

// Whether the kernels, as this GPU runs them, can be launched to overlap: code for GPUs before
// Hopper does not wait for the kernel before.
bool kernels_await_previous();

// Rows of a grid of an op on single elements; of more rows a block has several. They fill any GPU.
inline constexpr int64_t kMostElementwiseBlocks = 4096;

// out(t, :) = scale * table[token(t), :]
struct EmbeddingArgs {
  const void* table;  // [vocab, width]
  DType dtype;
  float* out;  // [tokens, width]
  int64_t width;
  int64_t tokens;
  float scale = 1;
};
void embedding(const EmbeddingArgs& args, const StepTables& step, const Queue& queue);

// out(t, :) += table[position(t) + offset, :]
struct PositionEmbeddingArgs {
  const void* table;  // [positions, width]
  DType dtype;
  int64_t offset;
  float* out;  // [tokens, width]
  int64_t width;
  int64_t tokens;
};
void position_embedding(const PositionEmbeddingArgs& args, const StepTables& step,
                        const Queue& queue);

// What an op writes for the product that comes next, rounded to f16 or bf16 as narrow() does.
struct NarrowCopy {
  void* y = nullptr;  // [rows, width], contiguous; null: none
  DType dtype = DType::kF32;
};

// Y(t, g, :) [+]= norm(X(t, g, :)) * (weight_plus + weight) [+ bias], group g at t * stride + g *
// n. rms: x / sqrt(mean(x^2) + eps)      layer: (x - mean) / sqrt(var + eps)
struct NormArgs {
  bool layer_norm;
  const float* x;
  int64_t x_stride;
  float* y;  // may equal x; null: the copy alone is written
  int64_t y_stride;
  int64_t rows;
  int64_t groups;
  int64_t n;
  const float* weight;  // [n]
  const float* bias;    // [n] or null
  float eps;
  NarrowCopy copy = {};  // [rows, groups * n]
  float weight_plus = 0;
  bool accumulate = false;  // add to what Y holds, which is not null then
};
void norm(const NormArgs& args, const Queue& queue);

// One part of a stacked linear op, for few tokens:
//   C(t, r) = [C(t, r) +] [bias(r) +] sum_k A(t, k) * W(r, k)      t < tokens <= kMatvecTokens
// Reads the weights once, in f32 arithmetic.
struct MatvecArgs {
  const float* a;  // [tokens, cols], rows a_stride apart
  int64_t a_stride;
  int64_t tokens;
  const void* w;  // [rows, cols], each below 2^28
  DType dtype;
  int64_t rows;
  int64_t cols;
  const float* bias;  // [rows] or null
  bool accumulate;
  float* c;  // [tokens, rows], rows c_stride apart
  int64_t c_stride;
};
void matvec(const MatvecArgs& args, const Queue& queue);

// For products by cuBLAS: y(t, :) = x(t, :) in `dtype` (f16 or bf16, to nearest even), contiguous.
// What exceeds f16 becomes its largest number, here and in pages of that dtype.
void narrow(const float* x, int64_t x_stride, int64_t rows, int64_t cols, DType dtype, void* y,
            const Queue& queue);
// y(t, i) += x(t, i); x_stride 0: x has one row, for all
void add(const float* x, int64_t x_stride, int64_t rows, int64_t cols, float* y, int64_t y_stride,
         const Queue& queue);
// y(t, i) = x(t, i)
void copy_columns(const float* x, int64_t x_stride, int64_t rows, int64_t cols, float* y,
                  int64_t y_stride, const Queue& queue);

// Divides numbers below 2^31 without a division: n / d = (high 32 bits of n * multiplier + n) >>
// shift, after Granlund and Montgomery, "Division by invariant integers using multiplication"
// (1994).
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr Divisor(int64_t d)  // NOLINT: a divisor is the number that it divides by; 1 to 2^31 - 1
      : value_(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << shift_) < value_) ++shift_;
    multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - value_) << 32) / value_ + 1);
  }
  __host__ __device__ constexpr operator int64_t() const { return value_; }
  __host__ __device__ constexpr uint32_t divide(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{n} * multiplier_ >> 32) + n) >> shift_;
  }

 private:
  uint32_t value_ = 1, multiplier_ = 1, shift_ = 0;
};

// The first compute capability, times ten, whose tensor cores multiply bf16. bf16 holds what f16
// does not; before it, f16 is all there is.
inline constexpr int kBf16Compute = 80;

// The KV pages of one entry, each K then V, [kv_heads, page_tokens, head_dim] (cpu/kv_page.h). They
// are found by their first unit: 2 * page_tokens * head_dim elements from `base` on.
struct KvPool {
  void* base;
  DType dtype;
  Divisor page_tokens;
  int64_t kv_heads;  // of the entry
  int64_t head_dim;
};

// Rotates q and k heads in place, halves (i, i + rotary/2) or neighbours (2i, 2i + 1) paired, by
// position * inv_freq[i] rounded to f32, cos and sin times `factor`.
struct RopeArgs {
  float* x;  // [tokens, width], heads from `offset`
  int64_t width;
  int64_t offset;
  int64_t heads;
  int64_t head_dim;
  int64_t rotary;
  const float* inv_freq;  // [rotary / 2]
  float factor;
  int64_t tokens;
  bool neighbours = false;
};
void rope(const RopeArgs& args, const StepTables& step, const Queue& queue);

// Appends K and V of every row to their pages, rounded to the pool's dtype. With `rotate`, q heads
// are rotated in place, and K heads on their way to the pages only: rope fused with the append.
struct AppendArgs {
  float* x;  // [tokens, width]: k heads from k_offset, v heads from v_offset
  int64_t width;
  int64_t k_offset, v_offset;
  int64_t layer;  // KV entry
  KvPool kv;
  int64_t tokens;
  const RopeArgs* rotate;  // host pointer, or null; its heads end with the k heads
};
void append(const AppendArgs& args, const StepTables& step, const Queue& queue);

// out = softmax(cap(scale q k^T), masked to 0 <= i - j and i - j < window if window > 0) v over the
// pages of each row's sequence, or their attention (m, s, o) merged into a partial, which is laid
// out as helm::AttendOp says. Runs of one token have a kernel of their own. The visible positions
// are cut into contiguous ranges, 1 to 65535 splits, whose results are merged; splits beyond the
// work are empty, so a launch stays right when it is replayed at another context. partials: the
// larger of attention_partials_bytes(runs, ..., decode_splits) and (tokens, ..., prompt_splits).
// cap(x) = softcap * tanh(x / softcap), or x where softcap is 0.
inline constexpr int64_t kMaxHeadDim = 256;
struct AttentionArgs {
  const float* x;  // [tokens, width]: q heads from q_offset
  int64_t width;
  int64_t q_offset;
  float* out;      // [tokens, heads * head_dim], or null and
  float* partial;  // [tokens, heads * (head_dim + 2)]
  int64_t heads;
  float scale;
  int64_t window;
  int64_t layer;  // KV entry
  KvPool kv;      // head_dim <= kMaxHeadDim
  int64_t tokens;
  int64_t rows;  // of all runs; no other row is touched
  int64_t runs;
  int64_t singles;        // runs of one token
  int64_t decode_splits;  // for those
  int64_t prompt_splits;  // for the others
  void* partials;         // of splits; null with one
  int compute = 0;        // capability of the GPU times ten; 0: sums of f32 alone
  float softcap = 0;
  float cap_inverse = 0;         // 2 / softcap, where there is one
  const float* sinks = nullptr;  // [heads], where `out` is written; see helm::AttentionOp
};
void attention(const AttentionArgs& args, const StepTables& step, const Queue& queue);
// Whether tensor cores serve runs of several tokens: for pages of f16 from 7.5 on, of bf16 from 8.0
// on, with heads in whole pieces of 16 bytes and without a softcap. Softmax weights are then
// rounded to the pages' dtype.
bool in_tensor_cores(const AttentionArgs& args);

// partial = attention to no position
void reset_partial(float* partial, int64_t tokens, int64_t heads, int64_t head_dim,
                   const Queue& queue);

// out = both partials merged, normalised; 0 where neither has seen a position
struct MergeArgs {
  const float* first;   // [tokens, heads * (head_dim + 2)]
  const float* second;  // likewise
  float* out;           // [tokens, heads * head_dim]
  int64_t heads;
  int64_t head_dim;
  int64_t tokens;
  const float* sinks = nullptr;  // [heads] or null
};
void merge_partials(const MergeArgs& args, const Queue& queue);

// gated: Y(t, i) [+]= act(X(t, i)) * X(t, n + i);  plain: Y(t, i) [+]= act(X(t, i))
struct ActivationArgs {
  ActivationKind kind;
  bool gated;
  const float* x;
  int64_t x_stride;
  float* y;  // may equal x; null: the copy alone is written
  int64_t y_stride;
  int64_t rows;
  int64_t n;
  NarrowCopy copy = {};     // [rows, n]
  float factor = 1;         // of kScale and kSoftcap
  bool accumulate = false;  // add to what Y holds, which is not null then
};
void activation(const ActivationArgs& args, const Queue& queue);

// out(i, :) = in(output_row(i), :)
void select(const float* in, float* out, int64_t width, int64_t outputs, const StepTables& step,
            const Queue& queue);

}  // namespace helm::cuda
