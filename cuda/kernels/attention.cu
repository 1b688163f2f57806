// Attention over pages: chooses the kernel, merges the splits, resets and merges partials.
#include "attention.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = 128;

// The result of a row: sum_i o(i) exp2(m(i) - M) and sum_i s(i) exp2(m(i) - M), M = max_i m(i),
// splits in order.
__global__ void __launch_bounds__(kThreads)
    merge_splits_kernel(const AttentionArgs a, const int32_t* row_runs) {
  const int64_t row = blockIdx.x;  // of [tokens, heads]
  const int64_t token = row / a.heads;
  if (a.rows < a.tokens && row_runs[token] < 0) return;
  const int64_t head_dim = a.kv.head_dim;
  const auto* base = static_cast<const float*>(a.partials);
  const float* o = base + row * a.splits * head_dim;
  const float* m_s = base + a.tokens * a.heads * a.splits * head_dim + row * a.splits * 2;
  ResultRow to(a, token, row - token * a.heads);
  const Sums held = to.held();
  __syncthreads();
  float top = kMinusInf;
  for (int64_t i = 0; i < a.splits; ++i) top = fmaxf(top, m_s[2 * i]);
  for (int64_t d = threadIdx.x; d < head_dim; d += kThreads) {
    float sum = 0, out = 0;
    for (int64_t i = 0; i < a.splits; ++i) {
      if (m_s[2 * i + 1] == 0.0f) continue;
      const float weight = exp2f(m_s[2 * i] - shift_of(top));
      sum = fmaf(m_s[2 * i + 1], weight, sum);
      out = fmaf(o[i * head_dim + d], weight, out);
    }
    to.take(held, {top, sum});
    to.store(d, out);
    if (d == 0) to.store_sums();
  }
}

__global__ void __launch_bounds__(kThreads)
    reset_kernel(float* partial, int64_t heads, int64_t head_dim) {
  float* row = partial + blockIdx.x * heads * (head_dim + 2);
  for (int64_t i = threadIdx.x; i < heads * (head_dim + 2); i += kThreads) {
    row[i] = i < heads ? kMinusInf : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) merge_partials_kernel(const MergeArgs a) {
  const int64_t row = blockIdx.x;  // of [tokens, heads]
  const int64_t token = row / a.heads, head = row - token * a.heads;
  const PartialRow<const float> first(a.first, token, head, a.heads, a.head_dim);
  const PartialRow<const float> second(a.second, token, head, a.heads, a.head_dim);
  const float shift = shift_of(fmaxf(*first.m, *second.m));
  const float w1 = exp2f((*first.m - shift) * kLog2E), w2 = exp2f((*second.m - shift) * kLog2E);
  const float sum = fmaf(*first.s, w1, *second.s * w2);
  const float factor = sum > 0.0f ? 1.0f / sum : sum;
  for (int64_t d = threadIdx.x; d < a.head_dim; d += kThreads) {
    a.out[row * a.head_dim + d] = fmaf(first.o[d], w1, second.o[d] * w2) * factor;
  }
}

}  // namespace

int64_t attention_partials_bytes(int64_t tokens, int64_t heads, int64_t head_dim, int64_t splits) {
  return splits <= 1 ? 0 : tokens * heads * splits * (head_dim + 2) * int64_t{sizeof(float)};
}

void attention(const AttentionArgs& args, const StepTables& step, cudaStream_t stream) {
  if (args.rows == 0) return;
  if (args.rows == args.runs) {
    attention_decode(args, step, stream);
  } else {
    attention_prefill(args, step, stream);
  }
  if (args.splits > 1) {
    launch(merge_splits_kernel, static_cast<unsigned>(args.tokens * args.heads), kThreads, 0,
           stream, args, step.row_runs);
  }
}

void reset_partial(float* partial, int64_t tokens, int64_t heads, int64_t head_dim,
                   cudaStream_t stream) {
  if (tokens == 0) return;
  launch(reset_kernel, static_cast<unsigned>(tokens), kThreads, 0, stream, partial, heads,
         head_dim);
}

void merge_partials(const MergeArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return;
  launch(merge_partials_kernel, static_cast<unsigned>(args.tokens * args.heads), kThreads, 0,
         stream, args);
}

}  // namespace helm::cuda
