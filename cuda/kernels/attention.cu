// Attention over pages: chooses the kernel, merges the splits.
#include "attention.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = 128;

// out(row) = sum_i o(i) exp2(m(i) - M) / sum_i s(i) exp2(m(i) - M), M = max_i m(i), splits in
// order.
__global__ void __launch_bounds__(kThreads) merge_kernel(const AttentionArgs a) {
  const int64_t row = blockIdx.x;  // of [tokens, heads]
  const int64_t head_dim = a.kv.head_dim;
  const auto* base = static_cast<const float*>(a.partials);
  const float* o = base + row * a.splits * head_dim;
  const float* m_s = base + a.tokens * a.heads * a.splits * head_dim + row * a.splits * 2;
  float top = kMinusInf;
  for (int64_t i = 0; i < a.splits; ++i) top = fmaxf(top, m_s[2 * i]);
  top = shift_of(top);
  for (int64_t d = threadIdx.x; d < head_dim; d += kThreads) {
    float sum = 0, out = 0;
    for (int64_t i = 0; i < a.splits; ++i) {
      if (m_s[2 * i + 1] == 0.0f) continue;
      const float weight = exp2f(m_s[2 * i] - top);
      sum = fmaf(m_s[2 * i + 1], weight, sum);
      out = fmaf(o[i * head_dim + d], weight, out);
    }
    a.out[row * head_dim + d] = sum == 0.0f ? 0.0f : out / sum;
  }
}

}  // namespace

int64_t attention_partials_bytes(int64_t tokens, int64_t heads, int64_t head_dim, int64_t splits) {
  return splits <= 1 ? 0 : tokens * heads * splits * (head_dim + 2) * int64_t{sizeof(float)};
}

void attention(const AttentionArgs& args, const StepTables& step, cudaStream_t stream) {
  if (args.tokens == 0) return;
  if (args.tokens == args.runs) {
    attention_decode(args, step, stream);
  } else {
    attention_prefill(args, step, stream);
  }
  if (args.splits > 1) {
    launch(merge_kernel, static_cast<unsigned>(args.tokens * args.heads), kThreads, 0, stream,
           args);
  }
}

}  // namespace helm::cuda
