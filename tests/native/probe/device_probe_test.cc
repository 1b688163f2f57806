// The probe of an accelerator finds what a simulated one was told to be.
#include <doctest/doctest.h>

#include <cmath>

#include "helm/machine.h"
#include "support/check.h"

namespace helm::test {
namespace {

void check_timing(const ProbeTiming& timing, bool flops, bool bytes) {
  CHECK((timing.flops > 0) == flops);
  CHECK((timing.bytes > 0) == bytes);
  CHECK(timing.run_s.size() >= 1);
  CHECK(timing.undisturbed_s.size() >= 1);
  CHECK(timing.undisturbed_s.size() <= timing.run_s.size());
  for (const double s : timing.run_s) CHECK((std::isfinite(s) && s > 0));
}

}  // namespace

TEST_CASE("device probe: every probe of a simulated accelerator") {
  DeviceProbe probe("sim", 0);  // raised to the minimum
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    check_timing(probe.matmul(format_of(dtype), 1, 0), true, true);
    if (kFew && dtype != DType::kBF16) continue;
    check_timing(probe.matmul(format_of(dtype), 17, 0), true, true);
    check_timing(probe.attention(dtype, 4, 1, 1024, 0), true, true);
    check_timing(probe.attention(dtype, 2, 33, 600, 0), true, true);
  }
  check_timing(probe.elementwise(3, 0), false, true);
  check_timing(probe.empty_ops(0, 0), false, false);
  check_timing(probe.empty_ops(16, 0), false, false);
  check_timing(probe.empty_step(false, 0), false, false);
}

TEST_CASE("device probe: the link is the one given") {
  DeviceProbe probe("sim:link=2GB/s,latency=1ms", 0);
  for (const bool to_device : {false, true}) {
    for (const bool page_locked : {false, true}) {
      const ProbeTiming timing = probe.copy(to_device, page_locked, 0);
      CHECK(timing.run_s[0] >= timing.bytes / 2e9);  // no machine makes it faster
    }
  }
  // Two copies of a millisecond that the step without them lacks.
  CHECK(probe.empty_step(true, 0).run_s[0] >= 2e-3);
  CHECK(probe.queued_copies(3, 0).run_s[0] >= 3e-3);
}

TEST_CASE("device probe: what cannot be had is refused") {
  CHECK_THROWS_AS(DeviceProbe("tpu", 0), Error);
  CHECK_THROWS_AS(DeviceProbe("sim:vram=64MiB", 0), Error);
  DeviceProbe probe("sim", 0);
  CHECK_THROWS_AS(probe.matmul({}, 0, 0), Error);
  CHECK_THROWS_AS(probe.attention(DType::kF32, 1, 5, 4, 0), Error);
  CHECK_THROWS_AS(probe.elementwise(1 << 20, 0), Error);
  CHECK_THROWS_AS(probe.empty_ops(-1, 0), Error);
  CHECK_THROWS_AS(probe.queued_copies(0, 0), Error);
}

}  // namespace helm::test
