// The device on newer generations, as the emulation says it is one.
#include <doctest/doctest.h>

#include <string>
#include <utility>

#include "cuda_emulation.h"
#include "cuda_test_device.h"
#include "device/device_conformance.h"
#include "reference_blas.h"

namespace {

using helm::test::open_cuda_test_device;

// Says so until the end of the test.
class Capability {
 public:
  Capability(int major, int minor) { cuda_emulation::set_compute_capability(major, minor); }
  ~Capability() { cuda_emulation::set_compute_capability(7, 5); }
  Capability(const Capability&) = delete;
  Capability& operator=(const Capability&) = delete;
};

}  // namespace

TEST_CASE("newer GPUs pass what the oldest passes, with the workspace that cuBLAS asks for") {
  for (const auto& [major, minor] : {std::pair{7, 5}, {8, 0}, {9, 0}, {12, 0}}) {
    CAPTURE(major);
    const Capability capability(major, minor);
    helm::test::TinyShape shape;
    shape.weight_dtype = shape.kv_dtype = "bf16";
    helm::test::conform_stage(open_cuda_test_device, {shape, true});
    CHECK(helm::test::last_blas_workspace_bytes() == int64_t{major >= 9 ? 32 : 8} << 20);
    helm::test::conform_attention_pieces(open_cuda_test_device, shape, helm::DType::kF32,
                                         major >= 8 ? helm::DType::kBF16 : helm::DType::kF32);
    helm::test::conform_copies(open_cuda_test_device);
    const auto plan = helm::Plan::from_json(helm::test::tiny_model(shape).plan);
    const int64_t bytes = open_cuda_test_device(0)->workspace_bytes(plan, plan.units);
    CHECK((bytes > int64_t{32} << 20) == (major >= 9));
    CHECK(bytes > int64_t{8} << 20);
  }
}

TEST_CASE("a GPU before Turing is refused by name") {
  const Capability capability(7, 0);
  try {
    open_cuda_test_device(0);
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kDevice);
    CHECK(std::string(error.what()).find("compute capability 7.0; HELM needs 7.5") !=
          std::string::npos);
  }
}
