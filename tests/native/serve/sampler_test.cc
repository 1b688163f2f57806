// The sampler: filters against a naive enumeration, frequencies, determinism.
#include <doctest/doctest.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "serve/sampler.h"

namespace {

std::vector<float> random_logits(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(n);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

// The probabilities that the documented filters leave, by sorting everything in double precision.
std::map<int32_t, double> oracle(const std::vector<float>& logits, const helm::SamplingParams& p) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (p.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(p.top_k)));
  double total = 0;
  std::vector<double> weights;
  for (const int32_t id : order) {
    weights.push_back(
        std::exp((logits[static_cast<size_t>(id)] - logits[static_cast<size_t>(order[0])]) /
                 static_cast<double>(p.temperature)));
    total += weights.back();
  }
  std::map<int32_t, double> kept;
  double mass = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && (mass >= p.top_p * total || weights[i] < p.min_p)) break;
    kept[order[i]] = weights[i];
    mass += weights[i];
  }
  for (auto& [id, weight] : kept) weight /= mass;
  return kept;
}

}  // namespace

TEST_CASE("greedy takes the largest logit, the first of equals") {
  const std::vector<float> logits = {1, 5, 3, 5};
  helm::Sampler sampler({}, 4, {});
  CHECK(sampler.draw(logits).id == 1);
}

TEST_CASE("greedy finds the largest of any place and number, and refuses a NaN anywhere") {
  for (const size_t size : {1U, 2U, 15U, 16U, 17U, 33U, 50U, 5000U}) {
    for (size_t at = 0; at < size; at += size < 1000 ? 1 : 97) {
      CAPTURE(size);
      CAPTURE(at);
      std::vector<float> logits(size, -2.0F);
      logits[at] = -1.0F;
      helm::Sampler sampler({}, static_cast<int64_t>(size), {});
      CHECK(sampler.draw(logits).id == static_cast<int32_t>(at));
      logits[at] = std::numeric_limits<float>::quiet_NaN();
      CHECK_THROWS_AS(sampler.draw(logits), helm::Error);
    }
  }
}

TEST_CASE("greedy takes the first of the largest, far apart or not") {
  std::vector<float> logits(5000, -2.0F);
  for (const size_t at : {4999U, 4100U, 2050U, 2047U, 30U, 3U}) {
    logits[at] = 1.0F;
    helm::Sampler sampler({}, 5000, {});
    CHECK(sampler.draw(logits).id == static_cast<int32_t>(at));
  }
}

TEST_CASE("draws follow the filtered distribution") {
  const std::vector<float> logits = random_logits(50, 7);
  const std::vector<helm::SamplingParams> cases = {
      {.temperature = 1.0F},
      {.temperature = 0.7F, .top_k = 5},
      {.temperature = 1.5F, .top_p = 0.8F},
      {.temperature = 1.0F, .min_p = 0.2F},
      {.temperature = 1.2F, .top_k = 20, .top_p = 0.9F, .min_p = 0.05F}};
  for (helm::SamplingParams params : cases) {
    const std::map<int32_t, double> expected = oracle(logits, params);
    params.seed = 11;
    helm::Sampler sampler(params, 50, {});
    constexpr int kDraws = 20000;
    std::map<int32_t, int> counts;
    for (int i = 0; i < kDraws; ++i) ++counts[sampler.draw(logits).id];
    for (const auto& [id, count] : counts) CHECK(expected.count(id) == 1);
    for (const auto& [id, probability] : expected) {
      // Five standard deviations of a binomial frequency.
      const double bound = 5 * std::sqrt(probability * (1 - probability) / kDraws) + 1e-9;
      const double error = std::abs(counts[id] / static_cast<double>(kDraws) - probability);
      CHECK_MESSAGE(error <= bound, "token " << id << " error " << error << " bound " << bound);
    }
  }
}

TEST_CASE("equal seeds draw equal tokens, other seeds others") {
  const std::vector<float> logits = random_logits(1000, 3);
  const auto draw = [&](uint64_t seed) {
    helm::Sampler sampler({.temperature = 1.0F, .seed = seed}, 1000, {});
    std::vector<int32_t> ids;
    for (int i = 0; i < 30; ++i) ids.push_back(sampler.draw(logits).id);
    return ids;
  };
  CHECK(draw(1) == draw(1));
  CHECK(draw(1) != draw(2));
}

TEST_CASE("what a sampler draws from does not stay with it") {
  const std::vector<float> logits = random_logits(50'000, 4);
  std::vector<helm::Sampler> samplers(100, {{.temperature = 1.0F}, 50'000, {}});
  const auto taken = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  const size_t before = taken();
  for (helm::Sampler& sampler : samplers) sampler.draw(logits);
  CHECK(taken() < before + (1 << 20));
}

TEST_CASE("the repetition penalty lowers what was seen, in the prompt or drawn") {
  const std::vector<float> logits = {2.0F, 1.9F, 1.8F, -1.0F};
  const std::vector<int32_t> prompt = {0};
  helm::Sampler sampler({.repetition_penalty = 1.2F}, 4, prompt);
  CHECK(sampler.draw(logits).id == 1);
  CHECK(sampler.draw(logits).id == 2);
}

TEST_CASE("log-probabilities are those of the unmodified distribution") {
  const std::vector<float> logits = random_logits(100, 5);
  helm::Sampler sampler({.temperature = 0.3F, .top_k = 3, .seed = 9, .logprobs = 4}, 100, {});
  const helm::Sampler::Draw draw = sampler.draw(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  const auto expected = [&](int32_t id) { return logits[static_cast<size_t>(id)] - std::log(sum); };
  CHECK(std::abs(draw.logprob - expected(draw.id)) < 1e-5);
  REQUIRE(draw.top.size() == 4);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(std::abs(draw.top[i].second - expected(draw.top[i].first)) < 1e-5);
    if (i > 0) CHECK(draw.top[i].second <= draw.top[i - 1].second);
  }
  CHECK(draw.top[0].first == std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST_CASE("logits that are not finite raise an error instead of a token") {
  std::vector<float> logits(10, std::nanf(""));
  helm::Sampler sampler({}, 10, {});
  CHECK_THROWS_AS(sampler.draw(logits), helm::Error);
}
