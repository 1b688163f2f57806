// HELM's quantiser: near a naive one, within the errors that the formats promise, and nothing but
// the weights decides about the bytes.
#include "cpu/quantize.h"

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu/integer_isa.h"
#include "oracle.h"
#include "support/check.h"

namespace helm::test {
namespace {

const cpu::KernelTable& kernels() {
  return *cpu::kernels_scalar();
}

std::vector<float> gaussian(int64_t n, uint32_t seed, float mean = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, 0.02F);
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(normal(random));
  return values;
}

struct Quantised {
  std::vector<std::byte> bytes;
  std::vector<float> values;  // [rows, cols], read back
};

Quantised quantised(const Format& format, const std::vector<float>& w, int64_t rows, int64_t cols,
                    DType dtype = DType::kF32) {
  const std::vector<unsigned char> stored = encode(dtype, w);
  const Guarded<std::byte> out(format_bytes(format, rows, cols));
  CHECK(!cpu::quantize_strips(format, dtype, stored.data(), rows, cols, kernels(), out.data()));
  CHECK(out.intact());
  Quantised q{out.copy(), {}};
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    cpu::integer_scalar()->read_row(format, q.bytes.data() + r / 16 * strip_bytes(format, cols),
                                    static_cast<int>(r % 16), cols, row.data());
    q.values.insert(q.values.end(), row.begin(), row.end());
  }
  return q;
}

// Root of the mean squared error, by that of the weights.
double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    error += d * d, size += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(error / size);
}

// The best that a naive quantiser finds for 32 weights among ranges alone: w about s u - m, m >= 0.
double naive_error(const float* w) {
  double low = 0, high = w[0], best = INFINITY;
  for (int i = 0; i < 32; ++i)
    low = std::min<double>(low, w[i]), high = std::max<double>(high, w[i]);
  for (int range = 0; range <= 25; ++range) {
    const double s = (high - low) * (1 - 0.01 * range) / 15;
    double error = 0;
    for (int i = 0; i < 32; ++i) {
      const double u = std::min(15.0, std::max(0.0, std::nearbyint((w[i] - low) / s)));
      const double d = s * u + low - w[i];
      error += d * d;
    }
    best = std::min(best, error);
  }
  return best;
}

const Format kQ8 = {Codes::kC8, Scales::kS, 32, 128}, kQ4 = {Codes::kC4, Scales::kKM, 32};

}  // namespace

TEST_CASE("errors of Gaussian weights are those of the formats") {
  const std::vector<float> w = gaussian(64 * 512, 1);
  const double q8 = relative_error(quantised(kQ8, w, 64, 512).values, w);
  const double q4 = relative_error(quantised(kQ4, w, 64, 512).values, w);
  CHECK(q8 > 0.0050);
  CHECK(q8 < 0.0058);
  CHECK(q4 > 0.065);
  CHECK(q4 < 0.076);
}

TEST_CASE("q8: scales are the largest weight by 127, codes the nearest") {
  for (const auto& [rows, cols] : {std::pair{16, 32}, {17, 40}, {3, 300}, {33, 257}}) {
    const std::vector<float> w = random_floats(rows * cols, 2, Fill::kLarge);
    const std::vector<float> got = quantised(kQ8, w, rows, cols).values;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < cols; ++k) {
        double largest = 0;
        for (int64_t i = k / 32 * 32; i < std::min<int64_t>(cols, k / 32 * 32 + 32); ++i) {
          largest = std::max<double>(largest, std::abs(w[static_cast<size_t>(r * cols + i)]));
        }
        const double s = decode_f16(encode_f16(static_cast<float>(largest / 127)));
        const auto i = static_cast<size_t>(r * cols + k);
        // A scale that was rounded down lacks up to 127 halves of its last place at the ends.
        const double bound = s * (0.5 + 127 * 0x1p-11) * 1.0001;
        CHECK(std::abs(got[i] - static_cast<double>(w[i])) <= bound);
      }
    }
  }
}

TEST_CASE("q4: no group is much worse than what a naive search finds") {
  for (const float mean : {0.0F, 0.03F, -0.1F}) {
    const std::vector<float> w = gaussian(32 * 256, 3, mean);
    const std::vector<float> got = quantised(kQ4, w, 32, 256).values;
    double total = 0, naive_total = 0;
    for (size_t group = 0; group < w.size(); group += 32) {
      double error = 0;
      for (size_t i = group; i < group + 32; ++i) {
        const double d = static_cast<double>(got[i]) - w[i];
        error += d * d;
      }
      // Scales in eight bits of the largest of eight groups cost a little.
      CHECK(error <= 1.3 * naive_error(w.data() + group));
      total += error, naive_total += naive_error(w.data() + group);
    }
    CHECK(total < naive_total);
  }
}

TEST_CASE("quantised bytes depend on the weights alone: not on dtype, rows at once or kernels") {
  const int64_t rows = 37, cols = 330;
  std::vector<float> w = gaussian(rows * cols, 4);
  for (float& x : w) x = static_cast<float>(decode_bf16(encode_bf16(x)));
  for (const Format& format : {kQ8, kQ4}) {
    const Quantised whole = quantised(format, w, rows, cols);
    CHECK(quantised(format, w, rows, cols, DType::kBF16).bytes == whole.bytes);
    std::vector<std::byte> strips;
    for (int64_t row = 0; row < rows; row += 16) {
      const int64_t some = std::min<int64_t>(16, rows - row);
      const std::vector<float> part(w.begin() + row * cols, w.begin() + (row + some) * cols);
      const Quantised one = quantised(format, part, some, cols);
      strips.insert(strips.end(), one.bytes.begin(), one.bytes.end());
    }
    CHECK(strips == whole.bytes);
    const Guarded<std::byte> other(format_bytes(format, rows, cols));
    const auto& best = cpu::select_kernels();
    cpu::quantize_strips(format, DType::kF32, w.data(), rows, cols, best, other.data());
    CHECK(other.copy() == whole.bytes);
  }
}

TEST_CASE("zeros, tiny weights and groups of one value") {
  for (const Format& format : {kQ8, kQ4}) {
    const std::vector<float> zeros(64, 0.0F);
    CHECK(quantised(format, zeros, 2, 32).values == zeros);
    const std::vector<float> tiny(64, 0x1p-60F);
    CHECK(relative_error(quantised(format, tiny, 2, 32).values, tiny) <= 1.0);
    for (const float value : {0.5F, -0.5F, 3.0F}) {
      const std::vector<float> same(64, value);
      CHECK(relative_error(quantised(format, same, 2, 32).values, same) < 0.002);
    }
  }
}

TEST_CASE("a weight that no scale holds is refused by its row") {
  for (const Format& format : {kQ8, kQ4}) {
    for (const float bad : {NAN, INFINITY, -INFINITY, 3e30F}) {
      for (const int64_t row : {0, 5, 18}) {
        std::vector<float> w = gaussian(20 * 300, 5);
        w[static_cast<size_t>(row * 300 + 270)] = bad;
        w[static_cast<size_t>(19 * 300)] = bad;
        std::vector<std::byte> out(static_cast<size_t>(format_bytes(format, 20, 300)));
        const auto refused =
            cpu::quantize_strips(format, DType::kF32, w.data(), 20, 300, kernels(), out.data());
        REQUIRE(refused.has_value());
        CHECK(*refused == row);
      }
    }
  }
}

TEST_CASE("weights are quantised to HELM's own formats only") {
  CHECK(cpu::quantizes(kQ8));
  CHECK(cpu::quantizes(kQ4));
  const Format other = format_from_name("c6.k16");
  CHECK(!cpu::quantizes(other));
  std::byte out[1];
  const float w = 1;
  CHECK_THROWS_AS(cpu::quantize_strips(other, DType::kF32, &w, 1, 1, kernels(), out), Error);
}

}  // namespace helm::test
