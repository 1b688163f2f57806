// Attention over pages: chooses the kernel, merges the splits, resets and merges partials.
#include "attention.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMergeThreads = 256;
static_assert(kMaxHeadDim <= kMergeThreads);
constexpr int kMergedAtOnce = 512;  // splits whose weights shared memory holds

// reduce(x of every thread), the same for all; `meet` has a place per warp.
template <class Reduce>
__device__ __forceinline__ float over_block(float x, float* meet, const Reduce& reduce) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    x = reduce(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  if (threadIdx.x % kWarp == 0) meet[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = meet[0];
#pragma unroll
  for (int w = 1; w < kMergeThreads / kWarp; ++w) x = reduce(x, meet[w]);
  return x;
}

// The result of a row: sum_i o(i) exp2(m(i) - M) and sum_i s(i) exp2(m(i) - M), M = max_i m(i). An
// empty split has m = -inf, s = 0 and o = 0. Weights lie in shared memory, so that the loads of o
// wait for nothing. A thread adds V columns of a part of the splits. rows: of the splits; those of
// single runs are the runs, else the tokens.
template <int V>
__global__ void __launch_bounds__(kMergeThreads)
    merge_splits_kernel(const AttentionArgs a, const StepTables step, const int splits,
                        const int rows, const bool of_singles) {
  let_next_begin();
  await_previous();
  __shared__ float weights[kMergedAtOnce];
  __shared__ float meet[2][kMergeThreads / kWarp];
  __shared__ float of_parts[kMergeThreads * V];  // [parts, head_dim]
  const int heads = static_cast<int>(a.heads), row = static_cast<int>(blockIdx.x) / heads;
  const int head = static_cast<int>(blockIdx.x) - row * heads;
  const int32_t run_index = of_singles ? row : a.runs == 1 ? 0 : step.row_runs[row];
  if (run_index < 0) return;
  const Run& run = step.runs[run_index];
  if ((run.tokens == 1) != of_singles) return;
  if (!of_singles && (row < run.first_row || row >= run.first_row + run.tokens)) return;
  const int token = of_singles ? run.first_row : row;

  const auto head_dim = static_cast<int>(a.kv.head_dim), thread = static_cast<int>(threadIdx.x);
  const auto* base = static_cast<const float*>(a.partials);
  const float* o = base + int64_t{blockIdx.x} * splits * head_dim;
  const float* m_s =
      base + int64_t{rows} * heads * splits * head_dim + int64_t{blockIdx.x} * splits * 2;
  ResultRow to(a, token, head, row, rows);
  const Sums held = to.held();
  float top = kMinusInf;
  for (int i = thread; i < splits; i += kMergeThreads) top = fmaxf(top, m_s[2 * i]);
  top = over_block(top, meet[0], [](float x, float y) { return fmaxf(x, y); });
  const float shift = shift_of(top);
  const int columns = head_dim / V,
            parts = kMergeThreads / columns;  // a part: every so many splits
  const int part = thread / columns, d = (thread - part * columns) * V;
  float sum = 0, out[V] = {};
  for (int first = 0; first < splits; first += kMergedAtOnce) {
    const int count = min(kMergedAtOnce, splits - first);
    if (first > 0) __syncthreads();
    for (int i = thread; i < count; i += kMergeThreads) {
      weights[i] = exp2_fast(m_s[2 * (first + i)] - shift);
      sum = fmaf(m_s[2 * (first + i) + 1], weights[i], sum);
    }
    __syncthreads();
    if (part >= parts) continue;
    const float* from = o + int64_t{first} * head_dim + d;
#pragma unroll 8
    for (int i = part; i < count; i += parts) {
      float v[V];
      load_columns<DType::kF32>(from + int64_t{i} * head_dim, v);
#pragma unroll
      for (int k = 0; k < V; ++k) out[k] = fmaf(weights[i], v[k], out[k]);
    }
  }
  if (part < parts) {
#pragma unroll
    for (int k = 0; k < V; ++k) of_parts[part * head_dim + d + k] = out[k];
  }
  sum = over_block(sum, meet[1], [](float x, float y) { return x + y; });
  to.take(held, {top, sum});
  if (thread < head_dim) {
    float total = of_parts[thread];
    for (int p = 1; p < parts; ++p) total += of_parts[p * head_dim + thread];
    to.store(thread, total);
  }
  if (thread == 0) to.store_sums();
}

__global__ void __launch_bounds__(kThreads)
    reset_kernel(float* partial, int64_t heads, int64_t head_dim) {
  let_next_begin();
  await_previous();
  float* row = partial + blockIdx.x * heads * (head_dim + 2);
  for (int64_t i = threadIdx.x; i < heads * (head_dim + 2); i += kThreads) {
    row[i] = i < heads ? kMinusInf : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) merge_partials_kernel(const MergeArgs a) {
  let_next_begin();
  await_previous();
  const int64_t row = blockIdx.x;  // of [tokens, heads]
  const int token = static_cast<int>(blockIdx.x) / static_cast<int>(a.heads);
  const int64_t head = row - token * a.heads;
  const PartialRow<const float> first(a.first, token, head, a.heads, a.head_dim);
  const PartialRow<const float> second(a.second, token, head, a.heads, a.head_dim);
  const float shift = shift_of(fmaxf(*first.m, *second.m));
  const float w1 = exp2_fast((*first.m - shift) * kLog2E),
              w2 = exp2_fast((*second.m - shift) * kLog2E);
  float sum = fmaf(*first.s, w1, *second.s * w2);
  if (a.sinks != nullptr) sum += exp2_fast((a.sinks[head] - shift) * kLog2E);
  const float factor = sum > 0.0f ? 1.0f / sum : sum;
  for (int64_t d = threadIdx.x; d < a.head_dim; d += kThreads) {
    a.out[row * a.head_dim + d] = fmaf(first.o[d], w1, second.o[d] * w2) * factor;
  }
}

}  // namespace

void attention(const AttentionArgs& args, const StepTables& step, const Queue& queue) {
  const auto merge = [&](int64_t rows, int64_t splits, bool of_singles) {
    if (splits <= 1) return;
    const bool in_fours = args.kv.head_dim % 4 == 0 && aligned16(args.partials);
    launch(in_fours ? merge_splits_kernel<4> : merge_splits_kernel<1>,
           static_cast<unsigned>(rows * args.heads), kMergeThreads, 0, queue, args, step,
           static_cast<int>(splits), static_cast<int>(rows), of_singles);
  };
  if (args.singles > 0) {
    attention_decode(args, step, queue);
    merge(args.runs, args.decode_splits, true);
  }
  if (args.runs > args.singles) {
    (in_tensor_cores(args) ? attention_prompt : attention_prefill)(args, step, queue.stream);
    merge(args.tokens, args.prompt_splits, false);
  }
}

void reset_partial(float* partial, int64_t tokens, int64_t heads, int64_t head_dim,
                   const Queue& queue) {
  if (tokens == 0) return;
  launch(reset_kernel, static_cast<unsigned>(tokens), kThreads, 0, queue, partial, heads, head_dim);
}

void merge_partials(const MergeArgs& args, const Queue& queue) {
  if (args.tokens == 0) return;
  launch(merge_partials_kernel, static_cast<unsigned>(args.tokens * args.heads), kThreads, 0, queue,
         args);
}

}  // namespace helm::cuda
