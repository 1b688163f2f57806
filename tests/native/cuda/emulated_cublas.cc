// Stands in for libcublas.so.13 beside the emulation of the CUDA runtime: reference_blas.h under
// cuBLAS's names.
#include "reference_blas.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const helm::cuda::BlasApi blas = helm::test::reference_blas();

}  // namespace

EXPORT int cublasCreate_v2(void** handle) {
  return blas.create(handle);
}
EXPORT int cublasDestroy_v2(void* handle) {
  return blas.destroy(handle);
}
EXPORT int cublasSetStream_v2(void* handle, cudaStream_t stream) {
  return blas.set_stream(handle, stream);
}
EXPORT int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
  return blas.set_workspace(handle, workspace, bytes);
}
EXPORT int cublasGemmEx_64(void* handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                           const void* alpha, const void* a, int a_type, int64_t lda, const void* b,
                           int b_type, int64_t ldb, const void* beta, void* c, int c_type,
                           int64_t ldc, int compute_type, int algorithm) {
  return blas.gemm_ex(handle, trans_a, trans_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb,
                      beta, c, c_type, ldc, compute_type, algorithm);
}
EXPORT const char* cublasGetStatusName(int status) {
  return blas.status_name(status);
}
