// The comparison itself must fail where it should.
#include "support/check.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

namespace helm::test {
namespace {

struct Case {
  std::vector<float> got;
  std::vector<double> want, bound;
};

Case good_case() {
  Case c;
  c.got = random_floats(8 * 16, 1);
  c.want.assign(c.got.begin(), c.got.end());
  c.bound.assign(c.got.size(), 1e-6);
  return c;
}

}  // namespace

TEST_CASE("comparison accepts equal values and rejects NaN, a sign flip and one wrong row") {
  const Case good = good_case();
  CHECK(compare(good.got, good.want, good.bound, "good") == "");
  CHECK(compare_bits(good.got, good.got, "good") == "");

  Case nan = good;
  nan.got[77] = std::numeric_limits<float>::quiet_NaN();
  CHECK(compare(nan.got, nan.want, nan.bound, "nan").find("element 77") != std::string::npos);
  nan = good;
  nan.want[5] = std::nan("");
  CHECK(compare(nan.got, nan.want, nan.bound, "nan") != "");
  nan = good;
  nan.bound[5] = std::nan("");
  CHECK(compare(nan.got, nan.want, nan.bound, "nan") != "");

  Case flipped = good;
  flipped.got[3] = -flipped.got[3];
  CHECK(compare(flipped.got, flipped.want, flipped.bound, "flip") != "");
  CHECK(compare_bits(flipped.got, good.got, "flip") != "");

  Case row = good;
  for (size_t i = 16; i < 32; ++i) row.got[i] = row.got[i + 16];
  CHECK(compare(row.got, row.want, row.bound, "row") != "");

  Case shorter = good;
  shorter.got.pop_back();
  CHECK(compare(shorter.got, shorter.want, shorter.bound, "size") != "");
}

TEST_CASE("guarded memory notices a write in front of it") {
  Guarded<float> g(7);
  CHECK(g.intact());
  g.data()[0] = 1.0f;
  CHECK(g.intact());
  reinterpret_cast<unsigned char*>(g.data())[-1] = 0;
  CHECK_FALSE(g.intact());
}

}  // namespace helm::test
