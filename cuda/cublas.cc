#include "cuda/cublas.h"

#include <dlfcn.h>

#include "base/check.h"

namespace helm::cuda {
namespace {

constexpr const char* kLibrary = "libcublas.so.13";
constexpr const char* kLtLibrary = "libcublasLt.so.13";  // which kLibrary needs

template <class Function>
bool find(void* library, const char* name, Function& function, std::string& reason) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) reason = std::string("has no ") + name;
  return function != nullptr;
}

bool find_all(void* library, BlasApi& api, std::string& reason) {
  return find(library, "cublasCreate_v2", api.create, reason) &&
         find(library, "cublasDestroy_v2", api.destroy, reason) &&
         find(library, "cublasSetStream_v2", api.set_stream, reason) &&
         find(library, "cublasSetWorkspace_v2", api.set_workspace, reason) &&
         find(library, "cublasGemmEx_64", api.gemm_ex, reason) &&
         find(library, "cublasGetStatusName", api.status_name, reason);
}

// Loads one candidate; `reason` says why not.
bool load_one(const std::string& path, BlasApi& api, std::string& reason) {
  // First the library that it needs, from the same place: its own search path may lead elsewhere.
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  dlopen((directory + kLtLibrary).c_str(), RTLD_LAZY | RTLD_LOCAL);
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    reason = dlerror();
    return false;
  }
  return find_all(library, api, reason);
}

int blas_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return kBlasF16;
    case DType::kBF16:
      return kBlasBF16;
    case DType::kF32:
    case DType::kI8:  // no dtype of weights
      break;
  }
  return kBlasF32;
}

}  // namespace

std::vector<std::string> blas_candidates(std::span<const std::string> directories,
                                         const char* cuda_home) {
  std::vector<std::string> candidates;
  for (const std::string& directory : directories) {
    candidates.push_back(directory + "/" + kLibrary);
  }
  if (cuda_home != nullptr && *cuda_home != '\0') {
    candidates.push_back(std::string(cuda_home) + "/lib64/" + kLibrary);
  }
  candidates.push_back(std::string("/usr/local/cuda/lib64/") + kLibrary);
  candidates.emplace_back(kLibrary);
  return candidates;
}

BlasApi load_blas(std::span<const std::string> candidates, std::string* path) {
  std::string tried;
  for (const std::string& candidate : candidates) {
    BlasApi api{};
    std::string reason;
    if (load_one(candidate, api, reason)) {
      if (path != nullptr) *path = candidate;
      return api;
    }
    tried += "\n  " + candidate + ": " + reason;
  }
  fail(ErrorKind::kDevice,
       "[cuda] cuBLAS 13 was not found; install it with `pip install nvidia-cublas`, or set "
       "CUDA_HOME to a CUDA 13 toolkit. Tried:",
       tried);
}

Blas::Blas(const BlasApi& api, int ordinal) : api_(api), ordinal_(ordinal) {
  check(api_.create(&handle_), "creating a handle");
}

Blas::~Blas() {
  cudaSetDevice(ordinal_);
  api_.destroy(handle_);
}

void Blas::check(int status, const char* operation) const {
  if (status == kBlasSuccess) return;
  fail(ErrorKind::kDevice, "[cuda] cuBLAS, ", operation, ": ", api_.status_name(status));
}

void Blas::bind(cudaStream_t stream, void* workspace, int64_t workspace_bytes) {
  check(api_.set_stream(handle_, stream), "setting the stream");  // drops the workspace
  check(api_.set_workspace(handle_, workspace, static_cast<size_t>(workspace_bytes)),
        "setting the workspace");
}

void Blas::multiply(const Product& p) {
  // In cuBLAS's column-major terms: C is rows x tokens, W cols x rows (transposed), A cols x
  // tokens.
  const float alpha = 1;
  const float beta = p.accumulate ? 1 : 0;
  const int type = blas_type(p.dtype);
  const int compute = p.dtype == DType::kF32 ? kBlasCompute32FPedantic : kBlasCompute32F;
  check(api_.gemm_ex(handle_, kBlasOpT, kBlasOpN, p.rows, p.tokens, p.cols, &alpha, p.w, type,
                     p.cols, p.a, type, p.a_stride, &beta, p.c, kBlasF32, p.c_stride, compute,
                     kBlasGemmDefault),
        "multiplying");
}

}  // namespace helm::cuda
