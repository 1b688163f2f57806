// Rotary embedding, and keys and values into their pages; fused where a model has both.
#include "kernels.h"
#include "kv.cuh"
#include "vec.cuh"

namespace helm::cuda {
namespace {

constexpr int kWarps = 4;  // heads per block, each rotated or copied by one warp

// emit(d, value) for the rotated elements of one head. The angle is rounded to f32 as the reference
// implementations do, and is large: the fast sine would lose it.
template <class Emit>
__device__ void rotate_head(const float* x, const RopeArgs& rope, int32_t position, int lane,
                            const Emit& emit) {
  const int64_t half = rope.rotary / 2;
  for (int64_t i = lane; i < half; i += kWarp) {
    float sine, cosine;
    sincosf(static_cast<float>(position) * rope.inv_freq[i], &sine, &cosine);
    sine *= rope.factor, cosine *= rope.factor;
    const int64_t first = rope.neighbours ? 2 * i : i;
    const int64_t second = rope.neighbours ? first + 1 : i + half;
    const float x1 = x[first], x2 = x[second];
    emit(first, x1 * cosine - x2 * sine);
    emit(second, x2 * cosine + x1 * sine);
  }
}

__device__ __forceinline__ int64_t item_of_warp() {
  return int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
}

__global__ void __launch_bounds__(kWarps* kWarp)
    rope_kernel(const RopeArgs rope, const int32_t* positions) {
  let_next_begin();
  await_previous();
  const int64_t item = item_of_warp();
  if (item >= rope.tokens * rope.heads) return;
  const int64_t t = item / rope.heads;
  float* x = rope.x + t * rope.width + rope.offset + item % rope.heads * rope.head_dim;
  rotate_head(x, rope, positions[t], static_cast<int>(threadIdx.x % kWarp),
              [&](int64_t d, float v) { x[d] = v; });
}

// Items of a token: q heads to rotate, then k heads, then v heads. rope.rotary is 0 without
// rotation.
template <DType D>
__global__ void __launch_bounds__(kWarps* kWarp)
    append_kernel(const AppendArgs args, const RopeArgs rope, const int64_t q_heads,
                  const StepTables step) {
  let_next_begin();
  await_previous();
  const KvPool& kv = args.kv;
  const int64_t heads = q_heads + 2 * kv.kv_heads, item = item_of_warp();
  if (item >= args.tokens * heads) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t t = item / heads, head = item % heads - q_heads;
  const int32_t position = step.positions[t];
  float* row = args.x + t * args.width;
  if (head < 0) {
    float* x = row + rope.offset + (head + q_heads) * rope.head_dim;
    rotate_head(x, rope, position, lane, [&](int64_t d, float v) { x[d] = v; });
    return;
  }
  const Run run = step.runs[step.row_runs[t]];
  const bool is_key = head < kv.kv_heads;
  const int64_t kv_head = is_key ? head : head - kv.kv_heads;
  float* x = row + (is_key ? args.k_offset : args.v_offset) + kv_head * kv.head_dim;
  const auto block = static_cast<int32_t>(kv.page_tokens.divide(static_cast<uint32_t>(position)));
  if (block < run.first_block || block >= run.end_block) {  // another device appends
    if (is_key && rope.rotary > 0) {
      rotate_head(x, rope, position, lane, [&](int64_t d, float v) { x[d] = v; });
    }
    return;
  }
  const RunPages pages(step, run, args.layer);
  Store<D>* to = key_row<D>(kv, pages, kv_head, position) + (is_key ? 0 : value_offset(kv));
  int64_t copied = 0;  // elements before are rotated
  if (is_key && rope.rotary > 0) {
    rotate_head(x, rope, position, lane, [&](int64_t d, float v) { to[d] = narrowed<D>(v); });
    copied = rope.rotary;
  }
  for (int64_t d = copied + lane; d < kv.head_dim; d += kWarp) to[d] = narrowed<D>(x[d]);
}

unsigned blocks_of(int64_t items) {
  return static_cast<unsigned>(ceil_div(items, kWarps));
}

}  // namespace

void rope(const RopeArgs& args, const StepTables& step, const Queue& queue) {
  const int64_t items = args.tokens * args.heads;
  if (items == 0) return;
  launch(rope_kernel, blocks_of(items), kWarps * kWarp, 0, queue, args, step.positions);
}

void append(const AppendArgs& args, const StepTables& step, const Queue& queue) {
  if (args.tokens == 0) return;
  const RopeArgs rope = args.rotate == nullptr ? RopeArgs{} : *args.rotate;
  const int64_t q_heads = args.rotate == nullptr ? 0 : rope.heads - args.kv.kv_heads;
  const int64_t items = args.tokens * (q_heads + 2 * args.kv.kv_heads);
  with_dtype(args.kv.dtype, [&](auto dtype) {
    launch(append_kernel<decltype(dtype)::value>, blocks_of(items), kWarps * kWarp, 0, queue, args,
           rope, q_heads, step);
  });
}

}  // namespace helm::cuda
