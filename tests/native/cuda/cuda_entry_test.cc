// How the CUDA plugin is entered and finds cuBLAS, on the emulation.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cuda/cublas.h"
#include "cuda/device.h"
#include "cuda_emulation.h"
#include "device/cuda_entry.h"
#include "reference_blas.h"

extern "C" HelmCudaOpen helm_cuda_open;
extern "C" HelmCudaProbe helm_cuda_probe;

namespace {

using doctest::Contains;

// A directory for the test, removed afterwards.
class Directory {
 public:
  Directory() : path_(std::filesystem::temp_directory_path() / "helm-cublas-XXXXXX") {
    std::string name = path_.string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  std::string string() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("cuBLAS is looked for in the wheel, the toolkit, then the loader's path") {
  using Strings = std::vector<std::string>;
  const Strings wheel = {"/site/nvidia/cu13/lib"};
  CHECK(helm::cuda::blas_candidates(wheel, "/opt/cuda") ==
        Strings{"/site/nvidia/cu13/lib/libcublas.so.13", "/opt/cuda/lib64/libcublas.so.13",
                "/usr/local/cuda/lib64/libcublas.so.13", "libcublas.so.13"});
  CHECK(helm::cuda::blas_candidates({}, nullptr) ==
        Strings{"/usr/local/cuda/lib64/libcublas.so.13", "libcublas.so.13"});
}

TEST_CASE("the first cuBLAS that works is taken, and all failures are told") {
  const Directory broken;
  const std::string text_file = broken.string() + "/libcublas.so.13";
  std::ofstream(text_file) << "not a library";
  const std::string fake = std::string(HELM_TEST_CUBLAS_DIRECTORY) + "/libcublas.so.13";
  std::string path;
  const std::vector<std::string> works = {"/no/such/libcublas.so.13", text_file, fake};
  CHECK((helm::cuda::load_blas(works, &path).create != nullptr));
  CHECK(path == fake);
  const std::vector<std::string> fails = {"/no/such/libcublas.so.13", text_file, "libm.so.6"};
  try {
    helm::cuda::load_blas(fails);
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kDevice);
    const doctest::String message = error.what();
    CHECK(message == Contains("/no/such/libcublas.so.13: "));
    CHECK(message == Contains("No such file"));
    CHECK(message == Contains("too short"));
    CHECK(message == Contains("libm.so.6: has no cublasCreate_v2"));
  }
}

TEST_CASE("a product without a workspace is refused by name") {
  helm::cuda::Blas blas(helm::test::reference_blas(), 0);
  CHECK_THROWS_WITH_AS(blas.multiply({}), "[cuda] cuBLAS, multiplying: REFERENCE_NOT_INITIALIZED",
                       helm::Error);
}

TEST_CASE("the entry points check the number of the interface before anything else") {
  char message[256] = "";
  HelmCudaOptions options{};
  options.abi = HELM_CUDA_ABI + 1;
  helm::Device* device = nullptr;
  CHECK(helm_cuda_open(&options, &device, message, sizeof message) == kHelmCudaAbiDiffers);
  CHECK(device == nullptr);
  CHECK(doctest::String(message) == Contains("different builds"));
  int32_t count = -1;
  CHECK(helm_cuda_probe(HELM_CUDA_ABI + 1, nullptr, 0, &count, message, 9) == kHelmCudaAbiDiffers);
  CHECK(std::string(message) == "libhelm ");  // cut, not overrun
  CHECK(count == -1);
}

TEST_CASE("a machine without a GPU is reported as such") {
  cuda_emulation::set_device_count(0);
  char message[256] = "";
  HelmCudaOptions options{};
  options.abi = HELM_CUDA_ABI;
  helm::Device* device = nullptr;
  CHECK(helm_cuda_open(&options, &device, message, sizeof message) ==
        1 + static_cast<int>(helm::ErrorKind::kDevice));
  CHECK(doctest::String(message) == Contains("lists no GPU"));
  cuda_emulation::set_device_count(1);
}
