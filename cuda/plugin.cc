// The entry points of libhelm_cuda (cpp/device/cuda_entry.h). No exception leaves them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "base/check.h"
#include "cuda/check.h"
#include "cuda/cublas.h"
#include "cuda/device.h"
#include "device/cuda_entry.h"

namespace helm::cuda {
namespace {

// Runs `body`; what it throws becomes a status and a message.
template <class Body>
int guarded(uint32_t abi, char* message, size_t message_bytes, const Body& body) {
  const auto failed = [&](int status, const char* text) {
    std::snprintf(message, message_bytes, "%s", text);
    return status;
  };
  if (abi != HELM_CUDA_ABI) {
    return failed(kHelmCudaAbiDiffers, "libhelm and libhelm_cuda come from different builds");
  }
  try {
    body();
    return 0;
  } catch (const Error& error) {
    return failed(1 + static_cast<int>(error.kind()), error.what());
  } catch (const std::exception& error) {
    return failed(1 + static_cast<int>(ErrorKind::kDevice), error.what());
  }
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// At least one, or an Error that says why there is none.
int count_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0;
    int needed = 0;
    check(cudaDriverGetVersion(&driver), "reading the driver's version");
    check(cudaRuntimeGetVersion(&needed), "reading the runtime's version");
    fail(ErrorKind::kDevice, "[cuda] the NVIDIA driver supports CUDA ", version_text(driver),
         ", HELM needs ", version_text(needed), "; update the driver");
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
    fail(ErrorKind::kDevice,
         "[cuda] the NVIDIA driver lists no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES");
  }
  check(status, "listing the GPUs");
  return count;
}

HelmCudaGpu describe(int ordinal) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "reading the GPU's properties");
  HelmCudaGpu gpu{};
  std::snprintf(gpu.name, sizeof gpu.name, "%s", properties.name);
  gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  gpu.compute_major = properties.major;
  gpu.compute_minor = properties.minor;
  gpu.multiprocessors = properties.multiProcessorCount;
  return gpu;
}

std::unique_ptr<Device> open(const HelmCudaOptions& options) {
  const int count = count_gpus();
  if (options.ordinal < 0 || options.ordinal >= count) {
    fail(ErrorKind::kInvalid, "[cuda] GPU ", options.ordinal, " was asked for; there ",
         count == 1 ? "is 1" : "are " + std::to_string(count), ", counted from 0");
  }
  const std::vector<std::string> directories(
      options.blas_directories, options.blas_directories + options.blas_directory_count);
  const BlasApi blas = load_blas(blas_candidates(directories, std::getenv("CUDA_HOME")));
  DeviceOptions device;
  device.ordinal = options.ordinal;
  device.limit_bytes = options.limit_bytes;
  const char* graphs = std::getenv("HELM_CUDA_GRAPHS");
  device.graphs = graphs == nullptr || std::strcmp(graphs, "0") != 0;
  const char* overlap = std::getenv("HELM_CUDA_PDL");
  device.overlap = overlap == nullptr || std::strcmp(overlap, "0") != 0;
  return std::make_unique<CudaDevice>(device, blas);
}

}  // namespace
}  // namespace helm::cuda

extern "C" HELM_API int helm_cuda_open(const HelmCudaOptions* options, helm::Device** device,
                                       char* message, size_t message_bytes) {
  return helm::cuda::guarded(options->abi, message, message_bytes,
                             [&] { *device = helm::cuda::open(*options).release(); });
}

extern "C" HELM_API int helm_cuda_probe(uint32_t abi, HelmCudaGpu* gpus, int32_t capacity,
                                        int32_t* count, char* message, size_t message_bytes) {
  return helm::cuda::guarded(abi, message, message_bytes, [&] {
    *count = helm::cuda::count_gpus();
    for (int i = 0; i < std::min(*count, capacity); ++i) gpus[i] = helm::cuda::describe(i);
  });
}
