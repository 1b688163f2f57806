// The probes of stages time something on any number of threads; what they find is the machine's.
#include <doctest/doctest.h>

#include <cmath>
#include <set>
#include <vector>

#include "helm/machine.h"
#include "probe/synthetic.h"
#include "support/check.h"

namespace helm::test {
namespace {

void check_timings(const std::vector<ProbeTiming>& timings, size_t shapes, bool flops, bool bytes) {
  REQUIRE(timings.size() == shapes);
  for (const ProbeTiming& timing : timings) {
    CHECK((timing.flops > 0) == flops);
    CHECK((timing.bytes > 0) == bytes);
    CHECK(timing.run_s.size() >= 1);
    CHECK(timing.undisturbed_s.size() <= timing.run_s.size());
    for (const double s : timing.run_s) CHECK((std::isfinite(s) && s > 0));
  }
}

}  // namespace

TEST_CASE("stage probe: every probe on one thread and on three") {
  StageProbe probe(StageProbe::kMinimumBytes, {0, 1023});  // the second cannot be had
  for (const int threads : kFew ? std::vector{3} : std::vector{3, 1}) {
    CAPTURE(threads);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      if (kFew && dtype != DType::kBF16) continue;
      check_timings(probe.matmul(threads, format_of(dtype), 1, 0), 4, true, true);
      check_timings(probe.matmul(threads, format_of(dtype), 17, 0), 1, true, true);
      check_timings(probe.attention(threads, dtype, 2, 3, 1, 1024, 0), 1, true, true);
      check_timings(probe.attention(threads, dtype, 3, 2, 33, 600, 0), 1, true, true);
    }
    check_timings(probe.mapped_matvec(threads, DType::kBF16, 0), 8, true, true);
    check_timings(probe.compressed_matmul(threads, 1, 0), 8, true, true);
    check_timings(probe.compressed_matmul(threads, 17, 0), 2, true, true);
    check_timings(probe.copy(threads, 0), 1, false, true);
    check_timings(probe.compress(threads, 0), 1, false, true);
    check_timings(probe.attention(threads, DType::kI8, 2, 3, 1, 1024, 0), 1, true, true);
    check_timings(probe.elementwise(threads, 1, 0), 1, false, true);
    check_timings(probe.empty_ops(threads, 0, 0), 1, false, false);
    check_timings(probe.empty_ops(threads, 16, 0), 1, false, false);
    check_timings(probe.handovers(threads, 6, 0), 1, false, false);
  }
}

TEST_CASE("stage probe: the memory of any matrix is spread over all nodes") {
  constexpr int64_t kPages = 8;  // 16 MiB
  for (const int nodes : {1, 2, 4}) {
    for (const int members : {nodes, 6 * nodes, 64 * nodes}) {
      for (int64_t first = 0; first < 100; ++first) {
        std::set<int> seen;
        for (int64_t page = first; page < first + kPages; ++page) {
          const int member = probe::member_for_page(page, members);
          REQUIRE((member >= 0 && member < members));
          seen.insert(member * nodes / members);
        }
        CHECK(seen.size() == static_cast<size_t>(nodes));
      }
    }
  }
}

TEST_CASE("stage probe: bad arguments are refused") {
  StageProbe probe(0, {});  // raised to the minimum
  CHECK_THROWS_AS(probe.matmul(0, {}, 1, 0), Error);
  CHECK_THROWS_AS(probe.matmul(1, {}, 0, 0), Error);
  CHECK_THROWS_AS(probe.matmul(1, {}, 1 << 20, 0), Error);
  CHECK_THROWS_AS(probe.attention(1, DType::kF32, 2, 2, 5, 4, 0), Error);
  CHECK_THROWS_AS(probe.attention(1, DType::kF32, 2, 0, 1, 4, 0), Error);
  CHECK_THROWS_AS(probe.attention(1, DType::kF32, 0, 1, 1, 4, 0), Error);
  CHECK_THROWS_AS(probe.mapped_matvec(0, DType::kF32, 0), Error);
  CHECK_THROWS_AS(probe.matmul(1, {helm::Codes::kBF16C}, 1, 0), Error);
  CHECK_THROWS_AS(probe.compressed_matmul(0, 1, 0), Error);
  CHECK_THROWS_AS(probe.compressed_matmul(1, 0, 0), Error);
  CHECK_THROWS_AS(probe.compress(0, 0), Error);
  CHECK_THROWS_AS(probe.copy(0, 0), Error);
  CHECK_THROWS_AS(probe.elementwise(1, 0, 0), Error);
  CHECK_THROWS_AS(probe.empty_ops(1, -1, 0), Error);
  CHECK_THROWS_AS(probe.handovers(1, 0, 0), Error);
  CHECK_THROWS_AS(probe.handovers(1, 4, 0), Error);
}

}  // namespace helm::test
