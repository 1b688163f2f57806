// The device of cuda_test_device.h through the loader and the plugin, on a GPU or emulated.
// HELM_CUBLAS_DIR says where cuBLAS is.
#include "cuda_test_device.h"
#include "device/cuda_loader.h"

namespace helm::test {

std::unique_ptr<Device> open_cuda_test_device(int64_t limit_bytes) {
  CudaOptions options;
  options.limit_bytes = limit_bytes;
  options.plugin = HELM_TEST_CUDA_PLUGIN;
  options.blas_directories = named_cublas_directories();
  return open_cuda(options);
}

}  // namespace helm::test
