#include "reference_blas.h"

#include <launch.h>

#include <atomic>
#include <cstddef>

namespace helm::test {
namespace {

constexpr int kNotInitialized = 1;
constexpr int kInvalidValue = 7;
constexpr int kThreads = 64;

constexpr size_t kScribbled = 256;

std::atomic<int> live = 0;
std::atomic<int64_t> last_workspace_bytes = 0;

struct Handle {
  cudaStream_t stream;
  void* workspace;
  size_t workspace_bytes;
};

struct Product {
  int64_t m, n, k;
  const void* a;  // [m, k], rows lda apart: A transposed
  int64_t lda;
  const void* b;  // [n, k], rows ldb apart
  int64_t ldb;
  int type;
  float alpha, beta;
  float* c;  // [n, m], rows ldc apart
  int64_t ldc;
};

__device__ double element(const void* data, int type, int64_t i) {
  if (type == cuda::kBlasF32) return static_cast<const float*>(data)[i];
  const unsigned bits = static_cast<const uint16_t*>(data)[i];
  if (type == cuda::kBlasBF16) return __uint_as_float(bits << 16);
  const unsigned exponent = bits >> 10 & 31;
  const double fraction = (bits & 1023) / 1024.0;
  const double magnitude =
      exponent == 0 ? ldexp(fraction, -14) : ldexp(1 + fraction, static_cast<int>(exponent) - 15);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

__global__ void multiply(Product p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.m * p.n) return;
  const int64_t row = i % p.m;
  const int64_t column = i / p.m;
  double sum = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    sum += element(p.a, p.type, row * p.lda + k) * element(p.b, p.type, column * p.ldb + k);
  }
  float& c = p.c[column * p.ldc + row];
  c = static_cast<float>(p.alpha * sum + (p.beta == 0 ? 0 : p.beta * c));
}

int create(void** handle) {
  *handle = new Handle{};
  ++live;
  return cuda::kBlasSuccess;
}

int destroy(void* handle) {
  delete static_cast<Handle*>(handle);
  --live;
  return cuda::kBlasSuccess;
}

int set_stream(void* handle, cudaStream_t stream) {
  *static_cast<Handle*>(handle) = {stream, nullptr, 0};
  return cuda::kBlasSuccess;
}

int set_workspace(void* handle, void* workspace, size_t bytes) {
  if (bytes < kScribbled || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) return kInvalidValue;
  static_cast<Handle*>(handle)->workspace = workspace;
  static_cast<Handle*>(handle)->workspace_bytes = bytes;
  return cuda::kBlasSuccess;
}

int gemm_ex(void* handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
            const void* alpha, const void* a, int a_type, int64_t lda, const void* b, int b_type,
            int64_t ldb, const void* beta, void* c, int c_type, int64_t ldc, int compute_type,
            int algorithm) {
  const Handle& h = *static_cast<Handle*>(handle);
  if (h.workspace == nullptr) return kNotInitialized;
  const int compute =
      a_type == cuda::kBlasF32 ? cuda::kBlasCompute32FPedantic : cuda::kBlasCompute32F;
  if (trans_a != cuda::kBlasOpT || trans_b != cuda::kBlasOpN || a_type != b_type ||
      c_type != cuda::kBlasF32 || compute_type != compute || algorithm != cuda::kBlasGemmDefault ||
      lda < k || ldb < k || ldc < m) {
    return kInvalidValue;
  }
  const Product product{m,
                        n,
                        k,
                        a,
                        lda,
                        b,
                        ldb,
                        a_type,
                        *static_cast<const float*>(alpha),
                        *static_cast<const float*>(beta),
                        static_cast<float*>(c),
                        ldc};
  auto* const last = static_cast<std::byte*>(h.workspace) + h.workspace_bytes - kScribbled;
  cudaMemsetAsync(h.workspace, 0xff, kScribbled, h.stream);
  cudaMemsetAsync(last, 0xff, kScribbled, h.stream);
  last_workspace_bytes = static_cast<int64_t>(h.workspace_bytes);
  const auto blocks = static_cast<unsigned>((m * n + kThreads - 1) / kThreads);
  cuda::launch(multiply, dim3(blocks), dim3(kThreads), 0, h.stream, product);
  return cuda::kBlasSuccess;
}

const char* status_name(int status) {
  return status == kNotInitialized ? "REFERENCE_NOT_INITIALIZED" : "REFERENCE_INVALID_VALUE";
}

}  // namespace

cuda::BlasApi reference_blas() {
  return {create, destroy, set_stream, set_workspace, gemm_ex, status_name};
}

int live_blas_handles() {
  return live;
}

int64_t last_blas_workspace_bytes() {
  return last_workspace_bytes;
}

}  // namespace helm::test
