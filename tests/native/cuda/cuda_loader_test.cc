// What open_cuda() and cuda_status() say at every step that can fail, with libraries that stand in
// for the driver, the plugin (built against the emulation) and cuBLAS.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "device/cuda_entry.h"
#include "device/cuda_loader.h"

namespace {

constexpr const char* kAnyLibrary = "libm.so.6";  // where a library only has to exist

// A machine on which everything is there.
helm::CudaOptions complete() {
  helm::CudaOptions options;
  options.driver = kAnyLibrary;
  options.plugin = HELM_TEST_CUDA_EMULATED_PLUGIN;
  options.blas_directories = {HELM_TEST_CUBLAS_DIRECTORY};
  return options;
}

std::string failure(const helm::CudaOptions& options,
                    helm::ErrorKind kind = helm::ErrorKind::kDevice) {
  try {
    helm::open_cuda(options);
  } catch (const helm::Error& error) {
    CHECK(error.kind() == kind);
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("the plugin opens its device through the loader") {
  helm::CudaOptions options = complete();
  options.limit_bytes = 1000;
  const auto device = helm::open_cuda(options);
  CHECK(device->describe().kind == "cuda");
  CHECK(device->describe().free_bytes == 1000);
  const helm::CudaStatus status = helm::cuda_status(options);
  CHECK(status.problem.empty());
  REQUIRE(status.gpus.size() == 1);
  CHECK(status.gpus[0].name == device->describe().name);
  CHECK(status.gpus[0].memory_bytes == device->describe().memory_bytes);
}

TEST_CASE("a refusal inside the plugin keeps its kind") {
  helm::CudaOptions options = complete();
  options.limit_bytes = 1000;
  const auto device = helm::open_cuda(options);
  try {
    device->allocate(1001, "a test");
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kMemory);
  }
  options.ordinal = 3;
  CHECK_THROWS_WITH_AS(helm::open_cuda(options),
                       "[cuda] GPU 3 was asked for; there is 1, counted from 0", helm::Error);
}

TEST_CASE("without a driver the message says so") {
  helm::CudaOptions options = complete();
  options.driver = "libno-such-driver.so.1";
  const std::string message = failure(options, helm::ErrorKind::kAbsent);
  CHECK(contains(message, "no NVIDIA driver"));
  CHECK(contains(message, "libno-such-driver.so.1"));
  CHECK(helm::cuda_status(options).problem == message);
  CHECK(helm::cuda_status(options).gpus.empty());
}

TEST_CASE("the toolkit's stub is no driver") {
  helm::CudaOptions options = complete();
  options.driver = HELM_TEST_STUB_DRIVER;
  const std::string message = failure(options, helm::ErrorKind::kAbsent);
  CHECK(contains(message, "no NVIDIA driver"));
  CHECK(contains(message, "stub"));
}

TEST_CASE("without a plugin the message names the file and the build option") {
  helm::CudaOptions options = complete();
  options.plugin = "/no/such/libhelm_cuda.so";
  const std::string message = failure(options, helm::ErrorKind::kAbsent);
  CHECK(contains(message, "/no/such/libhelm_cuda.so does not exist"));
  CHECK(contains(message, "HELM_CUDA=ON"));
  options.plugin = "/dev/null";
  CHECK(contains(failure(options), "cannot be loaded"));
}

TEST_CASE("a library that is no plugin is refused") {
  helm::CudaOptions options = complete();
  options.plugin = std::string(HELM_TEST_CUBLAS_DIRECTORY) + "/libcublas.so.13";
  CHECK(contains(failure(options), "has no helm_cuda_open"));
}

TEST_CASE("HELM_CUBLAS_DIR lists folders") {
  const char* given = std::getenv("HELM_CUBLAS_DIR");
  const std::string before = given == nullptr ? "" : given;
  setenv("HELM_CUBLAS_DIR", "/first:/second folder::", 1);
  CHECK(helm::named_cublas_directories() == std::vector<std::string>{"/first", "/second folder"});
  setenv("HELM_CUBLAS_DIR", before.c_str(), 1);
}

TEST_CASE("without cuBLAS every place that was tried is listed") {
  helm::CudaOptions options = complete();
  options.blas_directories = {"/no/such/directory"};
  setenv("CUDA_HOME", "/no/such/toolkit", 1);
  const std::string message = failure(options);
  unsetenv("CUDA_HOME");
  if (message.empty()) return;  // this machine has a cuBLAS of its own
  CHECK(contains(message, "pip install nvidia-cublas"));
  CHECK(contains(message, "\n  /no/such/directory/libcublas.so.13: "));
  CHECK(contains(message, "\n  /no/such/toolkit/lib64/libcublas.so.13: "));
  CHECK(contains(message, "\n  libcublas.so.13: "));
}
