// Rows of logits against element-by-element arithmetic in double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "serve/logit_row.h"

namespace {

std::vector<float> random_row(size_t n, unsigned seed, bool ties) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> row(n);
  for (float& x : row) x = ties ? std::round(normal(random)) : normal(random);
  return row;
}

}  // namespace

TEST_CASE("weights are exponentials to 3 ulp, and nothing below the smallest normal number") {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> row = {0.0F, -1e-30F, -86.9F, -87.5F, -1e4F, -infinity};
  for (float x = -87; x <= 0; x += 0.0137F) row.push_back(x);
  for (const size_t size : {size_t{1}, size_t{3}, size_t{4}, size_t{5}, row.size()}) {
    std::vector<float> out(size + 1, -7.0F);
    helm::weigh(std::span(row).first(size), 0, 1, std::span(out).first(size));
    CHECK(out[size] == -7.0F);
    double sum = 0;
    for (size_t i = 0; i < size; ++i) {
      CAPTURE(row[i]);
      const double expected = row[i] <= -87 ? 0 : std::exp(static_cast<double>(row[i]));
      CHECK(std::abs(out[i] - expected) <= 3 * 0x1p-23 * expected);
      sum += expected;
    }
    const double found = helm::sum_weights(std::span(row).first(size), 0, 1);
    CHECK(std::abs(found - sum) <= 3 * 0x1p-23 * sum);
  }
}

TEST_CASE("weights count from the largest, over the temperature, whatever that is") {
  const std::vector<float> row = {5, 4, -3};
  std::vector<float> out(3);
  helm::weigh(row, 5, 0.5F, out);
  CHECK(out[0] == 1);
  CHECK(out[1] == doctest::Approx(std::exp(-2.0)));
  CHECK(out[2] == doctest::Approx(std::exp(-16.0)));
  helm::weigh(row, 5, 1e-40F, out);  // whose inverse is infinite
  CHECK(out == std::vector<float>{1, 0, 0});
  helm::weigh(row, 5, 3e38F, out);
  CHECK(out == std::vector<float>{1, 1, 1});
}

TEST_CASE("the likeliest of a row are those that sorting finds, by id") {
  for (const bool ties : {false, true}) {
    for (const size_t size : {1U, 15U, 64U, 65U, 500U, 5000U}) {
      const std::vector<float> row = random_row(size, static_cast<unsigned>(size), ties);
      std::vector<helm::Candidate> sorted;
      for (size_t i = 0; i < size; ++i) sorted.push_back({row[i], static_cast<int32_t>(i)});
      std::stable_sort(sorted.begin(), sorted.end(),
                       [](const auto& a, const auto& b) { return a.logit > b.logit; });
      for (const size_t k : {size_t{0}, size_t{1}, size_t{7}, size_t{63}, size - 1, size + 1}) {
        std::vector<int32_t> expected, found;
        for (size_t i = 0; i < std::min(k, size); ++i) expected.push_back(sorted[i].id);
        std::sort(expected.begin(), expected.end());
        for (const helm::Candidate& c : helm::likeliest(row, k)) found.push_back(c.id);
        CHECK(found == expected);
      }
    }
  }
}

TEST_CASE("those of at least a value are all found, in order") {
  for (const size_t size : {1U, 16U, 17U, 333U}) {
    const std::vector<float> row = random_row(size, 8, true);
    for (const float least : {-9.0F, 0.0F, 3.0F, 99.0F}) {
      std::vector<int32_t> expected, found;
      for (size_t i = 0; i < size; ++i) {
        if (row[i] >= least) expected.push_back(static_cast<int32_t>(i));
      }
      for (const helm::Candidate& c : helm::at_least(row, least)) {
        CHECK(c.logit == row[static_cast<size_t>(c.id)]);
        found.push_back(c.id);
      }
      CHECK(found == expected);
    }
  }
}
