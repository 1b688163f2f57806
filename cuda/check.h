// Turns CUDA's status codes into helm::Error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace helm::cuda {

// Throws Error{kDevice} that names the operation and CUDA's reason unless `status` is cudaSuccess.
void check(cudaError_t status, const char* operation);

// For messages: "412.0 MiB", or bytes below one MiB.
std::string size_text(int64_t bytes);

}  // namespace helm::cuda
