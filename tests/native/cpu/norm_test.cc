// RMS norm, layer norm and rotary embedding.
#include <doctest/doctest.h>

#include <array>
#include <cmath>

#include "oracle.h"
#include "tiers.h"

namespace helm::test {
namespace {

void check_norm(int64_t n, bool rms, bool in_place, Fill fill, uint32_t seed) {
  const int64_t tokens = 3, groups = 2, stride = groups * n + 3;
  for (const cpu::KernelTable* table : tiers()) {
    const Guarded<float> x(random_floats((tokens - 1) * stride + groups * n, seed, fill));
    const Guarded<float> y(random_floats(x.size(), seed + 1));
    const Guarded<float> weight(random_floats(n, seed + 2)), bias(random_floats(n, seed + 3));
    const cpu::NormArgs args{x.data(),
                             stride,
                             in_place ? x.data() : y.data(),
                             stride,
                             tokens,
                             groups,
                             n,
                             weight.data(),
                             seed % 2 ? bias.data() : nullptr,
                             1e-6f,
                             seed % 5 ? 0.0f : 1.0f,
                             seed % 3 == 1};
    const Expected want = oracle_norm(args, rms);
    (rms ? table->rms_norm : table->layer_norm)(args);
    std::vector<float> got;
    for (int64_t i = 0; i < tokens * groups * n; ++i) {
      got.push_back(args.y[i / (groups * n) * stride + i % (groups * n)]);
    }
    CHECK(compare(got, want.value, want.bound,
                  std::string(table->name) + (rms ? " rms_norm n " : " layer_norm n ") +
                      std::to_string(n) + " seed " + std::to_string(seed)) == "");
    CHECK((x.intact() && y.intact()));
  }
}

}  // namespace

TEST_CASE("norms: ragged sizes, in place, hard inputs") {
  uint32_t seed = 5000;
  for (int64_t n : {1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 128, 1000}) {
    for (bool rms : {false, true}) {
      for (Fill fill : kFills) check_norm(n, rms, seed % 3 == 0, fill, seed), ++seed;
    }
  }
}

TEST_CASE("rope: rotates the first elements of each head and leaves the rest") {
  uint32_t seed = 6000;
  for (int64_t round = 0; round < 14; ++round) {
    const int64_t rotary = std::array{2, 6, 16, 20, 34, 64, 128}[static_cast<size_t>(round / 2)];
    const bool neighbours = round % 2 == 1;
    const int64_t tokens = 3, heads = 2, head_dim = rotary + (rotary % 4), half = rotary / 2;
    const int64_t stride = heads * head_dim + 1;
    for (const cpu::KernelTable* table : tiers()) {
      const Guarded<float> x(random_floats((tokens - 1) * stride + heads * head_dim, seed));
      const Guarded<float> cos(random_floats(tokens * half, seed + 1));
      const Guarded<float> sin(random_floats(tokens * half, seed + 2));
      const std::vector<float> before = x.copy();
      Expected want{{before.begin(), before.end()}, std::vector<double>(before.size(), 0.0)};
      for (int64_t i = 0; i < tokens * heads * half; ++i) {
        const int64_t t = i / (heads * half), h = i / half % heads, j = i % half;
        const size_t a = static_cast<size_t>(t * stride + h * head_dim + (neighbours ? 2 * j : j));
        const size_t b = a + (neighbours ? 1 : static_cast<size_t>(half));
        const double c = cos.data()[t * half + j], s = sin.data()[t * half + j];
        want.value[a] = before[a] * c - before[b] * s;
        want.value[b] = before[b] * c + before[a] * s;
        want.bound[a] = want.bound[b] = 2 * kEps * (std::abs(before[a]) + std::abs(before[b]));
      }
      table->rope(
          {x.data(), stride, tokens, heads, head_dim, rotary, cos.data(), sin.data(), neighbours});
      CHECK(compare(x.copy(), want.value, want.bound,
                    std::string(table->name) + " rope " + std::to_string(rotary) + " seed " +
                        std::to_string(seed)) == "");
      CHECK(x.intact());
    }
    ++seed;
  }
}

}  // namespace helm::test
