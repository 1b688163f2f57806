// RMS and layer norm: a warp for a short group, a block for a long one.
#include "kernels.h"
#include "vec.cuh"

namespace helm::cuda {
namespace {

constexpr int64_t kLong = 1024;     // elements from which a group gets a block
constexpr int kBlockThreads = 512;  // of such a block
constexpr int kWarps = 4;           // groups of a block otherwise

// Over all kThreads threads that share a group, the result in each.
template <int kThreads>
__device__ float group_sum(float x) {
  x = warp_sum(x);
  if constexpr (kThreads > kWarp) {
    __shared__ float partial[kThreads / kWarp];
    __syncthreads();  // the previous sum has been read
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = 0;
    for (float p : partial) x += p;
  }
  return x;
}

// D: of the copy, f32 for none.
template <int kThreads, bool kLayerNorm, DType D>
__global__ void __launch_bounds__(kBlockThreads) norm_kernel(const NormArgs args) {
  let_next_begin();
  await_previous();
  const int64_t item = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (item >= args.rows * args.groups) return;
  const int64_t row = item / args.groups, offset = item % args.groups * args.n;
  const float* x = args.x + row * args.x_stride + offset;
  const int64_t to = row * args.y_stride + offset;
  auto* const copy = static_cast<Store<D>*>(args.copy.y) + item * args.n;
  const auto n = static_cast<float>(args.n);
  const auto sum_of = [&](auto f) {
    float sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < args.n; i += kThreads) sum += f(x[i]);
    return group_sum<kThreads>(sum);
  };
  const float mean = kLayerNorm ? sum_of([](float v) { return v; }) / n : 0.0f;
  const float square = sum_of([&](float v) { return (v - mean) * (v - mean); });
  const float scale = 1.0f / sqrtf(square / n + args.eps);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.n; i += kThreads) {
    const float unit = (x[i] - mean) * scale * (args.weight_plus + args.weight[i]);
    float y = args.bias == nullptr ? unit : unit + args.bias[i];
    if (args.accumulate) y += args.y[to + i];
    if constexpr (D != DType::kF32) copy[i] = narrowed<D>(y);
    if (D == DType::kF32 || args.y != nullptr) args.y[to + i] = y;
  }
}

// Elements that a thread keeps of its group, in pieces of four, so that they are read once and all
// at the same time.
template <int kThreads>
inline constexpr int kPieces = kThreads == kWarp ? 8 : 4;
template <int kThreads>
inline constexpr int64_t kMostKept = int64_t{kThreads} * kPieces<kThreads> * 4;

template <int kThreads, bool kLayerNorm, DType D>
__global__ void __launch_bounds__(kBlockThreads) kept_norm_kernel(const NormArgs args) {
  constexpr int C = kPieces<kThreads>;
  let_next_begin();
  const int64_t item = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const auto count = static_cast<int>(args.n), first = static_cast<int>(threadIdx.x) * 4;
  float weight[C][4], x[C][4] = {};
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const int i = first + c * kThreads * 4;
    if (i < count) load_columns<DType::kF32>(args.weight + i, weight[c]);
  }
  await_previous();
  if (item >= args.rows * args.groups) return;
  const int64_t row = item / args.groups, offset = item % args.groups * args.n;
  const float* from = args.x + row * args.x_stride + offset;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const int i = first + c * kThreads * 4;
    if (i < count) load_columns<DType::kF32>(from + i, x[c]);
  }
  const auto n = static_cast<float>(args.n);
  const auto sum_of = [&](auto f) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (first + c * kThreads * 4 >= count) break;
#pragma unroll
      for (const float v : x[c]) sum += f(v);
    }
    return group_sum<kThreads>(sum);
  };
  const float mean = kLayerNorm ? sum_of([](float v) { return v; }) / n : 0.0f;
  const float square = sum_of([&](float v) { return (v - mean) * (v - mean); });
  const float scale = 1.0f / sqrtf(square / n + args.eps);
  float* const to = args.y + row * args.y_stride + offset;
  auto* const copy = static_cast<Store<D>*>(args.copy.y) + item * args.n;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const int i = first + c * kThreads * 4;
    if (i >= count) break;
    float y[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float unit = (x[c][k] - mean) * scale * (args.weight_plus + weight[c][k]);
      y[k] = args.bias == nullptr ? unit : unit + args.bias[i + k];
    }
    if (args.accumulate) {
      float held[4];
      load_columns<DType::kF32>(to + i, held);
#pragma unroll
      for (int k = 0; k < 4; ++k) y[k] += held[k];
    }
    if constexpr (D != DType::kF32) store_columns<D>(copy + i, y);
    if (D == DType::kF32 || args.y != nullptr) store_columns<DType::kF32>(to + i, y);
  }
}

template <int kThreads, bool kLayerNorm, DType D>
void launch_norm(const NormArgs& args, const Queue& queue) {
  const bool in_fours = aligned16(args.x) && aligned16(args.y) && aligned16(args.copy.y) &&
                        aligned16(args.weight) && args.n % 4 == 0 && args.x_stride % 4 == 0 &&
                        args.y_stride % 4 == 0;
  const bool kept = in_fours && args.n <= kMostKept<kThreads>;
  const int64_t groups = kThreads == kWarp ? kWarps : 1;  // of a block
  launch(kept ? kept_norm_kernel<kThreads, kLayerNorm, D> : norm_kernel<kThreads, kLayerNorm, D>,
         static_cast<unsigned>(ceil_div(args.rows * args.groups, groups)),
         dim3(kThreads, static_cast<unsigned>(groups)), 0, queue, args);
}

}  // namespace

void norm(const NormArgs& args, const Queue& queue) {
  if (args.rows * args.groups == 0) return;
  with_dtype(args.copy.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    const auto launch_as = [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      args.layer_norm ? launch_norm<kThreads, true, D>(args, queue)
                      : launch_norm<kThreads, false, D>(args, queue);
    };
    if (args.n >= kLong) return launch_as(std::integral_constant<int, kBlockThreads>{});
    launch_as(std::integral_constant<int, kWarp>{});
  });
}

}  // namespace helm::cuda
