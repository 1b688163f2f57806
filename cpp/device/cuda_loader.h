// Finds and loads the CUDA plugin. Never falls back silently: whatever is missing is an Error that
// says which step failed and what to do.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

namespace helm {

struct CudaOptions {
  int ordinal = 0;
  int64_t limit_bytes = 0;  // that allocate() hands out at most; 0: no limit but the GPU's memory
  std::vector<std::string> blas_directories;  // where libcublas.so.13 may lie, looked at before the
                                              // wheel nvidia-cublas beside this package
  std::string plugin;                         // path; empty: libhelm_cuda.so beside libhelm
  std::string driver = "libcuda.so.1";        // the driver's library
};

// The folders that HELM_CUBLAS_DIR lists, separated by ":".
std::vector<std::string> named_cublas_directories();

// Throws Error{kAbsent} where there is no driver or no plugin in this build, Error{kDevice} unless
// there are a GPU that it supports and cuBLAS 13.
std::unique_ptr<Device> open_cuda(const CudaOptions& options);

struct CudaGpu {
  std::string name;
  int64_t memory_bytes;
  int compute_major;
  int compute_minor;
  int multiprocessors;
};

// For reports: the GPUs, by ordinal, or why there is none.
struct CudaStatus {
  std::vector<CudaGpu> gpus;
  std::string problem;
};
CudaStatus cuda_status(const CudaOptions& options = {});

}  // namespace helm
