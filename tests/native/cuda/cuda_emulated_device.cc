// The emulated device of cuda_test_device.h: the plugin's own classes with a reference cuBLAS.
#include <cstdlib>
#include <string_view>

#include "cuda/device.h"
#include "cuda_test_device.h"
#include "reference_blas.h"

namespace helm::test {

std::unique_ptr<Device> open_cuda_test_device(int64_t limit_bytes) {
  cuda::DeviceOptions options;
  options.limit_bytes = limit_bytes;
  const char* graphs = std::getenv("HELM_CUDA_GRAPHS");
  options.graphs = graphs == nullptr || std::string_view(graphs) != "0";
  const char* overlap = std::getenv("HELM_CUDA_PDL");
  options.overlap = overlap == nullptr || std::string_view(overlap) != "0";
  return std::make_unique<cuda::CudaDevice>(options, reference_blas());
}

}  // namespace helm::test
