// cuBLAS: found at run time and called through a table of functions, which tests replace. Knows
// nothing of plans or ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "helm/types.h"

namespace helm::cuda {

// The functions of cuBLAS 13 that are used. Its enumerations travel as int, which has their size.
struct BlasApi {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, cudaStream_t stream);
  int (*set_workspace)(void* handle, void* workspace, size_t bytes);
  int (*gemm_ex)(void* handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                 const void* alpha, const void* a, int a_type, int64_t lda, const void* b,
                 int b_type, int64_t ldb, const void* beta, void* c, int c_type, int64_t ldc,
                 int compute_type, int algorithm);
  const char* (*status_name)(int status);
};

// Values of cuBLAS's and CUDA's enumerations (cublas_api.h, library_types.h of CUDA 13).
inline constexpr int kBlasSuccess = 0;
inline constexpr int kBlasOpN = 0;
inline constexpr int kBlasOpT = 1;
inline constexpr int kBlasF32 = 0;
inline constexpr int kBlasF16 = 2;
inline constexpr int kBlasBF16 = 14;
inline constexpr int kBlasCompute32F = 68;
inline constexpr int kBlasCompute32FPedantic = 69;  // no TF32, no emulation by bf16
inline constexpr int kBlasGemmDefault = -1;

// Where to look for libcublas.so.13, in order: the given directories (the nvidia-cublas wheel's),
// the toolkit at `cuda_home` (null if unset) and in /usr/local/cuda, the system's loader path.
std::vector<std::string> blas_candidates(std::span<const std::string> directories,
                                         const char* cuda_home);

// The first candidate that can be loaded; `path` takes which. Throws Error{kDevice} that lists
// every candidate with its reason. The library stays loaded for good.
BlasApi load_blas(std::span<const std::string> candidates, std::string* path = nullptr);

// One cuBLAS handle of one device. Callers hold `mutex()` while they bind and enqueue.
class Blas {
 public:
  Blas(const BlasApi& api, int ordinal);  // the device is current
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  std::mutex& mutex() { return mutex_; }

  // What follows goes to `stream` and allocates nothing beside `workspace`.
  void bind(cudaStream_t stream, void* workspace, int64_t workspace_bytes);

  // C(t, r) = [C(t, r) +] sum_k A(t, k) W(r, k), summed in f32.
  struct Product {
    const void* a;  // [tokens, cols] of `dtype`, rows a_stride apart
    int64_t a_stride;
    const void* w;  // [rows, cols] of `dtype`
    DType dtype;
    int64_t tokens;
    int64_t rows;
    int64_t cols;
    bool accumulate;
    float* c;  // [tokens, rows], rows c_stride apart
    int64_t c_stride;
  };
  void multiply(const Product& product);

 private:
  void check(int status, const char* operation) const;

  BlasApi api_;
  int ordinal_;
  void* handle_ = nullptr;
  std::mutex mutex_;
};

// cuBLAS's recommendation for the workspace of a handle, by compute capability.
constexpr int64_t blas_workspace_bytes(int compute_major) {
  return (compute_major >= 9 ? int64_t{32} : int64_t{8}) << 20;
}

}  // namespace helm::cuda
