// Conversions between f32 and the storage types: every half, rounding ties, infinities, NaN; rows
// of integers with a scale.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>

#include "oracle.h"
#include "tiers.h"

namespace helm::test {
namespace {

bool is_nan16(DType dtype, uint16_t h) {
  return std::isnan(dtype == DType::kF16 ? decode_f16(h) : decode_bf16(h));
}

// Random bit patterns, plus the neighbourhood of every value halfway between two halves.
std::vector<float> hard_floats(DType dtype) {
  std::vector<float> out;
  std::mt19937 rng(9000);
  for (int i = 0; i < 100000; ++i)
    out.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng())));
  for (uint32_t h = 0; h < 0x7fff; ++h) {
    const double a = dtype == DType::kF16 ? decode_f16(static_cast<uint16_t>(h))
                                          : decode_bf16(static_cast<uint16_t>(h));
    const double b = dtype == DType::kF16 ? decode_f16(static_cast<uint16_t>(h + 1))
                                          : decode_bf16(static_cast<uint16_t>(h + 1));
    const float middle = static_cast<float>(std::isinf(b) ? a + a / 4096 : (a + b) / 2);
    out.insert(out.end(),
               {middle, std::nextafter(middle, INFINITY), -middle, std::nextafter(middle, 0.0f)});
  }
  for (float v : {65504.0f, 65519.99f, 65520.0f, 65536.0f, 3.4e38f, INFINITY, -INFINITY}) {
    out.push_back(v);
  }
  return out;
}

}  // namespace

TEST_CASE("widen: every f16 and bf16, and tails") {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (const cpu::KernelTable* table : tiers()) {
      std::vector<float> got(all.size());
      table->widen[index_of(dtype)](all.data(), got.data(), static_cast<int64_t>(all.size()));
      int wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        const double want = decode(dtype, all.data(), static_cast<int64_t>(i));
        const bool same = std::isnan(want)
                              ? std::isnan(got[i])
                              : got[i] == want && std::signbit(got[i]) == std::signbit(want);
        wrong += !same;
      }
      CHECK_MESSAGE(wrong == 0, table->name);
    }
  }
}

TEST_CASE("narrow: nearest even, overflow to infinity, NaN kept") {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const std::vector<float> x = hard_floats(dtype);
    for (const cpu::KernelTable* table : tiers()) {
      std::vector<uint16_t> got(x.size());
      table->narrow[index_of(dtype)](x.data(), got.data(), static_cast<int64_t>(x.size()));
      int wrong = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const uint16_t want = dtype == DType::kF16 ? encode_f16(x[i]) : encode_bf16(x[i]);
        const bool same = std::isnan(x[i]) ? is_nan16(dtype, got[i]) : got[i] == want;
        if (!same && wrong++ == 0) {
          FAIL_CHECK(table->name << " dtype " << index_of(dtype) << " x " << x[i] << " bits "
                                 << std::bit_cast<uint32_t>(x[i]) << " got " << got[i]
                                 << " expected " << want);
        }
      }
    }
  }
}

TEST_CASE("widen and narrow: tails touch nothing outside") {
  for (DType dtype : kAllTypes) {
    for (const cpu::KernelTable* table : tiers()) {
      for (int64_t n = 1; n <= 40; ++n) {
        const std::vector<float> values = random_floats(n, 9100);
        const Guarded<unsigned char> packed(n * dtype_bytes(dtype));
        const Guarded<float> in(values), out(n);
        table->narrow[index_of(dtype)](in.data(), packed.data(), n);
        CHECK(packed.copy() == encode(dtype, values));
        table->widen[index_of(dtype)](packed.data(), out.data(), n);
        for (int64_t i = 0; i < n; ++i) CHECK(out.data()[i] == decode(dtype, packed.data(), i));
        CHECK((packed.intact() && out.intact()));
      }
    }
  }
}

TEST_CASE("quantize: integers and scale of a row") {
  std::vector<std::vector<float>> rows;
  for (int64_t n = 1; n <= 40; ++n) rows.push_back(random_floats(n, 9200));
  for (Fill fill : kFills) rows.push_back(random_floats(257, 9201, fill));
  for (float size : {3.4e38f, 1e-30f, 1.5e-36f, 1.4e-36f, 1e-38f, 1e-45f, 0.0f}) {
    rows.push_back(random_floats(33, 9202));
    for (float& v : rows.back()) v *= size;
    rows.back()[7] = -size;
  }
  rows.push_back({127, 126.5f, 125.5f, 0.5f, 1.5f, -0.5f, -1.5f, -126.5f});  // ties to even
  for (float odd : {NAN, INFINITY, -INFINITY}) {
    for (size_t at : {0, 18, 36}) rows.push_back(random_floats(37, 9203)), rows.back()[at] = odd;
  }
  for (const std::vector<float>& row : rows) {
    const Quantized want = quantized(row);
    for (const cpu::KernelTable* table : tiers()) {
      const Guarded<float> x(row);
      const Guarded<int8_t> q(x.size());
      const float scale = table->quantize(x.data(), q.data(), x.size());
      const std::string label = std::string(table->name) + " n " + std::to_string(row.size());
      CHECK_MESSAGE(q.copy() == want.q, label);
      CHECK_MESSAGE(std::bit_cast<uint32_t>(scale) == std::bit_cast<uint32_t>(want.scale), label);
      CHECK((x.intact() && q.intact()));
      for (size_t i = 0; i < row.size() && scale > 0; ++i) {
        const double off = std::abs(static_cast<double>(scale) * want.q[i] - row[i]);
        CHECK_MESSAGE(off <= scale * (0.5 + 128 * kEps), label);
      }
    }
  }
}

}  // namespace helm::test
