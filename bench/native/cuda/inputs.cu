#include "inputs.h"

#include <algorithm>
#include <cstring>

#include "kernels/vec.cuh"

namespace helm::bench {
namespace {

__global__ void fill_kernel(uint32_t* words, int64_t n, uint32_t mask, uint32_t base) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    words[i] = (static_cast<uint32_t>(i) * 2654435761u & mask) | base;
  }
}

}  // namespace

void fill(const DeviceBuffer& buffer, DType dtype) {
  // Random signs and fractions; an exponent that means values of about 0.01 in each format.
  const uint32_t mask = dtype == DType::kF32   ? 0x807fffff
                        : dtype == DType::kF16 ? 0x83ff83ff
                                               : 0x807f807f;
  const uint32_t base = dtype == DType::kF32   ? 0x3c000000
                        : dtype == DType::kF16 ? 0x20002000
                                               : 0x3c003c00;
  const int64_t words = buffer.bytes() / 4;
  cuda::launch(fill_kernel, static_cast<unsigned>(std::clamp<int64_t>(words / 256, 1, 1024)), 256,
               0, nullptr, buffer.as<uint32_t>(), words, mask, base);
  check(cudaDeviceSynchronize(), "filling");
}

void upload(const DeviceBuffer& to, const std::vector<int32_t>& from) {
  check(cudaMemcpy(to.as(), from.data(), from.size() * sizeof(int32_t), cudaMemcpyDefault),
        "upload");
}

float widened(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  const uint16_t h = static_cast<const uint16_t*>(data)[i];
  if (dtype == DType::kF16) return __half2float(__ushort_as_half(h));
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

void require(bool right, const std::string& name, int64_t i, double got, double want) {
  if (right) return;
  throw Error(ErrorKind::kInvalid, "[bench] " + name + ": element " + std::to_string(i) + " is " +
                                       std::to_string(got) + ", expected " + std::to_string(want));
}

const char* name_of(DType dtype) {
  constexpr const char* kNames[kDTypes] = {"f32", "f16", "bf16"};
  return kNames[static_cast<int>(dtype)];
}

}  // namespace helm::bench
