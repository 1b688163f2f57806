// The probes give plausible numbers; what they measure is the machine, so no value is expected.
#include <doctest/doctest.h>

#include "probe/ceiling.h"
#include "tiers.h"

namespace helm::test {

TEST_CASE("probes: ceilings are positive and finite") {
  const double read = probe::stream_read_bytes_per_s(1, int64_t{64} << 20, 0.02);
  CHECK(read > 1e8);
  CHECK(read < 1e13);
  for (const cpu::KernelTable* table : tiers()) {
    const double flops = probe::fma_flops(1, 0.01, table);
    CHECK(flops > 1e7);
    CHECK(flops < 1e13);
  }
}

TEST_CASE("probes refuse what they cannot measure") {
  CHECK_THROWS_AS(probe::stream_read_bytes_per_s(0, int64_t{1} << 20, 0.01), Error);
  CHECK_THROWS_AS(probe::stream_read_bytes_per_s(-1, int64_t{1} << 20, 0.01), Error);
  CHECK_THROWS_AS(probe::stream_read_bytes_per_s(2, 4096, 0.01), Error);
  CHECK_THROWS_AS(probe::fma_flops(0, 0.01), Error);
}

}  // namespace helm::test
