#include "device/cuda_loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <sstream>

#include "base/check.h"
#include "device/cuda_entry.h"

namespace helm {
namespace {

// The longest message lists every place where cuBLAS was looked for.
constexpr size_t kMessageBytes = 8192;

// The directory of the library that this code is part of.
std::string own_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_directory), &info) == 0) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// What the toolkit links against, stubs/libcuda.so, answers every call with this.
constexpr int kStubLibrary = 34;  // CUDA_ERROR_STUB_LIBRARY

bool is_stub(void* driver) {
  using DriverGetVersion = int(int* version);
  auto* const get = reinterpret_cast<DriverGetVersion*>(dlsym(driver, "cuDriverGetVersion"));
  int version = 0;
  return get != nullptr && get(&version) == kStubLibrary;
}

// The plugin's library, which stays loaded for good: CUDA cannot be unloaded.
void* load_plugin(const CudaOptions& options) {
  void* driver = dlopen(options.driver.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr || is_stub(driver)) {
    fail(ErrorKind::kAbsent, "[cuda] there is no NVIDIA driver here (",
         driver == nullptr ? dlerror() : "the library found is the CUDA toolkit's stub of it",
         "); install it, or place everything on the CPU");
  }
  const std::string path =
      options.plugin.empty() ? own_directory() + "/libhelm_cuda.so" : options.plugin;
  if (access(path.c_str(), F_OK) != 0) {
    fail(ErrorKind::kAbsent, "[cuda] this build of HELM has no CUDA plugin (", path,
         " does not exist); install HELM where CUDA 13's nvcc is found, with "
         "`pip install . -C cmake.define.HELM_CUDA=ON`");
  }
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (plugin == nullptr) {
    fail(ErrorKind::kDevice, "[cuda] the CUDA plugin cannot be loaded: ", dlerror());
  }
  return plugin;
}

template <class Entry>
Entry* entry(void* plugin, const char* name) {
  auto* const found = reinterpret_cast<Entry*>(dlsym(plugin, name));
  if (found == nullptr) fail(ErrorKind::kDevice, "[cuda] the CUDA plugin has no ", name);
  return found;
}

void check_status(int status, const char* message) {
  if (status == 0) return;
  if (status == kHelmCudaAbiDiffers) {
    fail(ErrorKind::kDevice, "[cuda] ", message, "; reinstall HELM");
  }
  throw Error(static_cast<ErrorKind>(status - 1), message);
}

}  // namespace

std::vector<std::string> named_cublas_directories() {
  const char* listed = std::getenv("HELM_CUBLAS_DIR");
  std::istringstream list(listed == nullptr ? "" : listed);
  std::vector<std::string> found;
  for (std::string directory; std::getline(list, directory, ':');) {
    if (!directory.empty()) found.push_back(directory);
  }
  return found;
}

std::unique_ptr<Device> open_cuda(const CudaOptions& options) {
  auto* const open = entry<HelmCudaOpen>(load_plugin(options), kHelmCudaOpen);
  std::vector<std::string> places = options.blas_directories;
  places.push_back(own_directory() + "/../../nvidia/cu13/lib");  // the wheel nvidia-cublas
  std::vector<const char*> directories;
  for (const std::string& place : places) directories.push_back(place.c_str());
  HelmCudaOptions asked{};
  asked.abi = HELM_CUDA_ABI;
  asked.ordinal = options.ordinal;
  asked.limit_bytes = options.limit_bytes;
  asked.blas_directories = directories.data();
  asked.blas_directory_count = static_cast<int32_t>(directories.size());
  Device* device = nullptr;
  char message[kMessageBytes] = "";
  check_status(open(&asked, &device, message, sizeof message), message);
  return std::unique_ptr<Device>(device);
}

CudaStatus cuda_status(const CudaOptions& options) {
  CudaStatus status;
  try {
    auto* const probe = entry<HelmCudaProbe>(load_plugin(options), kHelmCudaProbe);
    HelmCudaGpu gpus[16] = {};
    int32_t count = 0;
    char message[kMessageBytes] = "";
    check_status(probe(HELM_CUDA_ABI, gpus, std::size(gpus), &count, message, sizeof message),
                 message);
    for (size_t i = 0; i < std::min(static_cast<size_t>(count), std::size(gpus)); ++i) {
      status.gpus.push_back({gpus[i].name, gpus[i].memory_bytes, gpus[i].compute_major,
                             gpus[i].compute_minor, gpus[i].multiprocessors});
    }
  } catch (const Error& error) {
    status.problem = error.what();
  }
  return status;
}

}  // namespace helm
