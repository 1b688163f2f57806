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
    const float unit = (x[i] - mean) * scale * args.weight[i];
    const float y = args.bias == nullptr ? unit : unit + args.bias[i];
    if constexpr (D != DType::kF32) copy[i] = narrowed<D>(y);
    if (D == DType::kF32 || args.y != nullptr) args.y[to + i] = y;
  }
}

template <bool kLayerNorm, DType D>
void launch_norm(const NormArgs& args, cudaStream_t stream) {
  const int64_t items = args.rows * args.groups;
  if (args.n >= kLong) {
    launch(norm_kernel<kBlockThreads, kLayerNorm, D>, static_cast<unsigned>(items), kBlockThreads,
           0, stream, args);
  } else {
    launch(norm_kernel<kWarp, kLayerNorm, D>, static_cast<unsigned>(ceil_div(items, kWarps)),
           dim3(kWarp, kWarps), 0, stream, args);
  }
}

}  // namespace

void norm(const NormArgs& args, cudaStream_t stream) {
  if (args.rows * args.groups == 0) return;
  with_dtype(args.copy.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    args.layer_norm ? launch_norm<true, D>(args, stream) : launch_norm<false, D>(args, stream);
  });
}

}  // namespace helm::cuda
