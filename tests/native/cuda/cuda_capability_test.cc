// The device on newer generations, as the emulation says it is one.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "cuda_emulation.h"
#include "cuda_test_device.h"
#include "device/device_conformance.h"
#include "reference_blas.h"
#include "support/this_build.h"

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
    if (helm::test::kFew && (major == 7 || major == 9)) continue;  // of each kind one
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

TEST_CASE("launches overlap where they are asked to and the GPU can, and change no bit") {
  helm::test::TinyShape shape;
  shape.weight_dtype = shape.kv_dtype = "f16";
  const auto overlapping_logits = [&](const char* wanted, int major, int64_t* launches) {
    const Capability capability(major, 0);
    setenv("HELM_CUDA_PDL", wanted, 1);
    const int64_t before = cuda_emulation::overlapping_launches();
    const auto logits = helm::test::stage_logits(open_cuda_test_device, shape);
    *launches = cuda_emulation::overlapping_launches() - before;
    unsetenv("HELM_CUDA_PDL");
    return logits;
  };
  int64_t asked = 0, unasked = 0, older = 0;
  const auto logits = overlapping_logits("1", 9, &asked);
  CHECK(logits == overlapping_logits("0", 9, &unasked));
  CHECK(logits == overlapping_logits("1", 8, &older));
  CHECK(asked > 10);
  CHECK(unasked == 0);
  CHECK(older == 0);
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
