// Activations, gated and plain, and addition.
#include <doctest/doctest.h>

#include <cmath>

#include "oracle.h"
#include "tiers.h"

namespace helm::test {
namespace {

constexpr cpu::Activation kKinds[] = {cpu::Activation::kSilu,     cpu::Activation::kGelu,
                                      cpu::Activation::kGeluTanh, cpu::Activation::kRelu,
                                      cpu::Activation::kScale,    cpu::Activation::kSoftcap};
constexpr float kFactor = 2.5f;

// Relative error of exp and a division; erf adds an absolute 5e-7 per unit of x (a rational fit).
double bound_of(cpu::Activation kind, double x, double y) {
  const double fit = kind == cpu::Activation::kGelu ? 5e-7 * std::min(std::abs(x), 8.0) : 0.0;
  // The exponent's rounding, relative to its size, is what the result's relative error amounts to.
  const double exponent =
      kind == cpu::Activation::kGeluTanh ? std::abs(x) * (2 + x * x * 0.08) : std::abs(x);
  return (8 + 3 * std::min(exponent, 110.0)) * kEps * std::abs(y) + fit +
         4e-37;  // x/2^128: exp overflowed
}

void check_activation(cpu::Activation kind, bool gated, bool in_place, int64_t n, Fill fill,
                      uint32_t seed) {
  const int64_t tokens = 2, width = gated ? 2 * n : n, x_stride = width + 1;
  for (const cpu::KernelTable* table : tiers()) {
    const Guarded<float> x(random_floats((tokens - 1) * x_stride + width, seed, fill));
    for (int64_t i = 0; i < x.size(); ++i) x.data()[i] *= 3;
    const std::vector<float> before = x.copy();
    const bool accumulate = seed % 3 == 0;
    const Guarded<float> y(random_floats((tokens - 1) * (n + 2) + n, seed + 1));
    const std::vector<float> y_before = y.copy();
    const int64_t y_stride = in_place ? x_stride : n + 2;
    float* out = in_place ? x.data() : y.data();
    table->activation(
        {kind, gated, x.data(), x_stride, out, y_stride, tokens, n, kFactor, accumulate});
    std::vector<float> got;
    Expected want;
    for (int64_t i = 0; i < tokens * n; ++i) {
      const float* row = before.data() + i / n * x_stride;
      const double v = row[i % n], gate = gated ? row[n + i % n] : 1.0;
      const double y0 = oracle_activation(kind, v, kFactor);
      const auto at = static_cast<size_t>(i / n * y_stride + i % n);
      const double held = accumulate ? (in_place ? before : y_before)[at] : 0;
      got.push_back(out[at]);
      want.value.push_back(held + y0 * gate);
      want.bound.push_back(bound_of(kind, v, y0) * std::abs(gate) +
                           2 * kEps * (std::abs(held) + std::abs(y0 * gate)));
    }
    CHECK(compare(got, want.value, want.bound,
                  std::string(table->name) + " activation " +
                      std::to_string(static_cast<int>(kind)) + " gated " + std::to_string(gated) +
                      " n " + std::to_string(n) + " seed " + std::to_string(seed)) == "");
    CHECK((x.intact() && y.intact()));
  }
}

}  // namespace

TEST_CASE("activations: ragged sizes, gated, in place, hard inputs") {
  uint32_t seed = 7000;
  for (cpu::Activation kind : kKinds) {
    for (int64_t n : {1, 7, 8, 9, 15, 16, 17, 33, 500}) {
      for (bool gated : {false, true}) {
        for (Fill fill : kFills)
          check_activation(kind, gated, seed % 2 == 0, n, fill, seed), ++seed;
      }
    }
  }
}

TEST_CASE("activations: extremes stay finite and NaN stays NaN") {
  const float kNan = std::nanf("");
  for (const cpu::KernelTable* table : tiers()) {
    for (cpu::Activation kind : kKinds) {
      if (kind == cpu::Activation::kScale || kind == cpu::Activation::kSoftcap) continue;
      const std::vector<float> x = {-1e30f, -200.0f, -90.0f, -0.0f, 0.0f,
                                    90.0f,  200.0f,  1e30f,  kNan};
      std::vector<float> y(x.size());
      const int64_t n = static_cast<int64_t>(x.size());
      table->activation({kind, false, x.data(), n, y.data(), n, 1, n});
      for (size_t i = 0; i + 1 < x.size(); ++i) {
        const double want = x[i] > 0 ? x[i] : 0;
        CHECK_MESSAGE(std::abs(y[i] - want) <= 1e-6 * std::abs(want) + 1e-30,
                      table->name << " kind " << static_cast<int>(kind) << " x " << x[i]);
      }
      CHECK(std::isnan(y.back()));
    }
  }
}

TEST_CASE("soft caps: small numbers keep their digits, extremes become the cap, NaN stays NaN") {
  const std::vector<float> x = {-INFINITY, -1e30f, -200.0f, 1e-6f, -1e-30f,      0.0f,
                                0.7f,      200.0f, 1e30f,   1e38f, std::nanf("")};
  const auto n = static_cast<int64_t>(x.size());
  for (const cpu::KernelTable* table : tiers()) {
    std::vector<float> y(x.size());
    table->activation(
        {cpu::Activation::kSoftcap, false, x.data(), n, y.data(), n, 1, n, 50.0f, false});
    for (size_t i = 0; i + 1 < x.size(); ++i) {
      const double want = 50 * std::tanh(static_cast<double>(x[i]) / 50);
      CHECK_MESSAGE(std::abs(y[i] - want) <= 8 * kEps * std::abs(want),
                    table->name << " x " << x[i]);
    }
    CHECK(std::isnan(y.back()));
  }
}

TEST_CASE("a limited swiglu: both halves bounded, 1 added to up") {
  constexpr cpu::Activation kKind = cpu::Activation::kSwigluLimit;
  for (const cpu::KernelTable* table : tiers()) {
    for (const int64_t n : {1, 8, 13, 100}) {
      const std::vector<float> x = random_floats(2 * n, 7900);
      std::vector<float> got(static_cast<size_t>(n));
      const float limit = 0.75f;
      table->activation({kKind, true, x.data(), 2 * n, got.data(), n, 1, n, limit, false});
      Expected want;
      for (int64_t i = 0; i < n; ++i) {
        const double gate = oracle_activation(kKind, x[static_cast<size_t>(i)], limit);
        const double up = x[static_cast<size_t>(n + i)];
        const double bounded = std::min<double>(std::max<double>(up, -limit), limit) + 1;
        want.value.push_back(gate * bounded);
        want.bound.push_back(16 * kEps * std::abs(gate * bounded) + 1e-37);
      }
      CHECK(compare(got, want.value, want.bound, std::string(table->name) + " swiglu") == "");
    }
  }
}

TEST_CASE("add: y += x") {
  for (int64_t n : {1, 7, 8, 9, 16, 17, 100}) {
    for (const cpu::KernelTable* table : tiers()) {
      const Guarded<float> x(random_floats(n, 8000)), y(random_floats(n, 8001));
      std::vector<float> want = y.copy();
      for (int64_t i = 0; i < n; ++i) want[static_cast<size_t>(i)] += x.data()[i];
      table->add(x.data(), y.data(), n);
      CHECK(compare_bits(y.copy(), want, std::string(table->name) + " add") == "");
      CHECK(y.intact());
    }
  }
}

}  // namespace helm::test
