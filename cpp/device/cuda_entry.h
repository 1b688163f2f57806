// The entry points of the CUDA plugin, libhelm_cuda: what it exports and libhelm looks up. Beyond
// them the two meet in helm::Device, so both must come from the same headers: HELM_CUDA_ABI is a
// number made from them (cmake/cuda.cmake), which every entry point checks first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.h"

extern "C" {

struct HelmCudaOptions {
  uint32_t abi;  // HELM_CUDA_ABI; nothing else is read if it differs
  int32_t ordinal;
  int64_t limit_bytes;                  // see helm::CudaOptions
  const char* const* blas_directories;  // [blas_directory_count]
  int32_t blas_directory_count;
};

struct HelmCudaGpu {
  char name[256];
  int64_t memory_bytes;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
};

// Both return 0, or a failure with `message` filled: kHelmCudaAbiDiffers, or 1 + helm::ErrorKind.
inline constexpr int kHelmCudaAbiDiffers = -1;

// Opens a GPU; the caller deletes *device. Nothing is thrown.
using HelmCudaOpen = int(const HelmCudaOptions* options, helm::Device** device, char* message,
                         size_t message_bytes);
inline constexpr const char* kHelmCudaOpen = "helm_cuda_open";

// Lists up to `capacity` GPUs; *count takes how many there are, at least one.
using HelmCudaProbe = int(uint32_t abi, HelmCudaGpu* gpus, int32_t capacity, int32_t* count,
                          char* message, size_t message_bytes);
inline constexpr const char* kHelmCudaProbe = "helm_cuda_probe";

}  // extern "C"
