// The GPU of cuda_test_device.h, through the loader and the plugin. HELM_TEST_CUBLAS may name the
// directory of libcublas.so.13.
#include <cstdlib>

#include "cuda_test_device.h"
#include "device/cuda_loader.h"

namespace helm::test {

std::unique_ptr<Device> open_cuda_test_device(int64_t limit_bytes) {
  CudaOptions options;
  options.limit_bytes = limit_bytes;
  options.plugin = HELM_TEST_CUDA_PLUGIN;
  if (const char* directory = std::getenv("HELM_TEST_CUBLAS")) {
    options.blas_directories.emplace_back(directory);
  }
  return open_cuda(options);
}

}  // namespace helm::test
