// What all cases stand on: device memory, and the reading of it that is the ceiling.
#include "cases.h"
#include "kernels/vec.cuh"

namespace helm::bench {
namespace {

__global__ void __launch_bounds__(256) read_kernel(const uint4* p, int64_t n, float* sink) {
  uint32_t sum = 0;
  constexpr int kLoads = 8;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kLoads - 1) * stride < n; i += kLoads * stride) {
    uint4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) v[u] = cuda::load_streaming(p + i + u * stride);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < n; i += stride) sum += cuda::load_streaming(p + i).x;
  if (sum == 0x12345678u) *sink = 1;  // keeps the loads
}

}  // namespace

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(ErrorKind::kInvalid,
              std::string("[bench] ") + what + ": " + cudaGetErrorString(error));
}

DeviceBuffer::DeviceBuffer(int64_t bytes) : bytes_(bytes) {
  check(cudaMalloc(&data_, static_cast<size_t>(bytes)), "allocating device memory");
}
DeviceBuffer::~DeviceBuffer() {
  cudaFree(data_);
}

void stream_read(const void* p, int64_t bytes, float* sink, cudaStream_t stream) {
  cuda::launch(read_kernel, static_cast<unsigned>(multiprocessors() * 8), 256, 0, stream,
               static_cast<const uint4*>(p), bytes / 16, sink);
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "attribute");
  return count;
}

}  // namespace helm::bench
