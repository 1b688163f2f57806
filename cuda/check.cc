#include "cuda/check.h"

#include <cstdio>

#include "base/check.h"

namespace helm::cuda {

void check(cudaError_t status, const char* operation) {
  if (status == cudaSuccess) return;
  const char* remedy = "";
  if (status == cudaErrorNoKernelImageForDevice) {
    remedy =
        "; this build has no code for this GPU: name its architecture in "
        "HELM_CUDA_ARCHITECTURES when building HELM";
  }
  fail(ErrorKind::kDevice, "[cuda] ", operation, ": ", cudaGetErrorString(status), " (",
       cudaGetErrorName(status), ")", remedy);
}

std::string size_text(int64_t bytes) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  char text[32];
  if (bytes < kMiB) {
    std::snprintf(text, sizeof text, "%lld bytes", static_cast<long long>(bytes));
  } else {
    std::snprintf(text, sizeof text, "%.1f MiB",
                  static_cast<double>(bytes) / static_cast<double>(kMiB));
  }
  return text;
}

}  // namespace helm::cuda
