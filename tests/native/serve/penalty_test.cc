// What changes logits before a draw, and the draws of former versions, against a naive sampler.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "serve/sampler.h"
#include "support/check.h"

namespace {

using helm::Sampler;
using helm::SamplingParams;

std::vector<float> random_logits(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(n);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

// SplitMix64.
double uniform(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

// As HELM has drawn since its first version: in order of id, or with top-p or min-p the least
// likely of those kept first; all in double precision.
int32_t naive_draw(const std::vector<float>& logits, const SamplingParams& p, uint64_t n) {
  const float most = *std::max_element(logits.begin(), logits.end());
  std::vector<std::pair<double, int32_t>> kept;
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((static_cast<double>(logits[i]) - most) / p.temperature);
    kept.emplace_back(weight, static_cast<int32_t>(i));
    total += weight;
  }
  double mass = total;
  if (p.top_p < 1 || p.min_p > 0) {
    std::stable_sort(kept.begin(), kept.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    mass = 0;
    size_t count = 0;
    for (; count < kept.size(); ++count) {
      if (count > 0 && (mass >= p.top_p * total || kept[count].first < p.min_p)) break;
      mass += kept[count].first;
    }
    kept.resize(count);
    std::reverse(kept.begin(), kept.end());
  }
  double sum = 0;
  for (const auto& [weight, id] : kept) {
    sum += weight;
    if (sum > uniform(p.seed, n) * mass) return id;
  }
  return kept.back().second;
}

// Allows what its list says.
class Allowing : public helm::TokenConstraint {
 public:
  explicit Allowing(std::vector<int32_t> ids) : ids_(std::move(ids)) {}
  void mask(std::span<uint32_t> allowed) override {
    std::fill(allowed.begin(), allowed.end(), 0);
    for (const int32_t id : ids_) allowed[static_cast<size_t>(id) / 32] |= 1U << id % 32;
  }
  void commit(int32_t) override {}
  std::vector<int32_t> forced() override { return {}; }
  bool is_stopped() const override { return false; }

 private:
  std::vector<int32_t> ids_;
};

std::vector<int32_t> greedy(const SamplingParams& params, const std::vector<float>& logits,
                            int draws, std::vector<int32_t> context = {}) {
  Sampler sampler(params, std::ssize(logits), context);
  std::vector<int32_t> ids;
  for (int i = 0; i < draws; ++i) ids.push_back(sampler.draw(logits).id);
  return ids;
}

}  // namespace

TEST_CASE("draws are those of the naive sampler, seed by seed") {
  const std::vector<SamplingParams> cases = {{.temperature = 1.0F},
                                             {.temperature = 0.6F},
                                             {.temperature = 0.8F, .top_p = 0.95F},
                                             {.temperature = 2.5F, .top_p = 0.999F},
                                             {.temperature = 1.0F, .min_p = 0.02F},
                                             {.temperature = 1.5F, .top_p = 0.7F, .min_p = 1e-3F}};
  for (const size_t vocab : {1U, 31U, 1024U, 1025U, 5003U}) {
    const std::vector<float> logits = random_logits(vocab, static_cast<unsigned>(vocab));
    for (SamplingParams params : cases) {
      params.seed = vocab + 3;
      Sampler sampler(params, static_cast<int64_t>(vocab), {});
      for (uint64_t n = 0; n < (helm::test::kFew ? 20 : 200); ++n) {
        CHECK(sampler.draw(logits).id == naive_draw(logits, params, n));
      }
    }
  }
}

TEST_CASE("top-k of the whole vocabulary is no top-k") {
  const std::vector<float> logits = random_logits(700, 1);
  Sampler all({.temperature = 1.0F, .seed = 5}, 700, {});
  Sampler most({.temperature = 1.0F, .top_k = 699, .seed = 5}, 700, {});
  int equal = 0;
  for (int i = 0; i < 300; ++i) equal += all.draw(logits).id == most.draw(logits).id ? 1 : 0;
  CHECK(equal >= 299);
}

TEST_CASE("the presence penalty is subtracted once, the frequency penalty each time") {
  const std::vector<float> logits = {2.0F, 1.1F, 0.4F, -5.0F};
  CHECK(greedy({.presence_penalty = 1.0F}, logits, 4) == std::vector<int32_t>{0, 1, 0, 0});
  // 2, 1.1, 1.0, 0.4, 0.1, 0, -0.6, -0.9 ...
  CHECK(greedy({.frequency_penalty = 1.0F}, logits, 7) ==
        std::vector<int32_t>{0, 1, 0, 2, 1, 0, 2});
  CHECK(greedy({.presence_penalty = 0.5F, .frequency_penalty = 0.5F}, logits, 3) ==
        std::vector<int32_t>{0, 1, 0});
  CHECK(greedy({.frequency_penalty = -1.0F}, {1, 1, 0}, 3) == std::vector<int32_t>{0, 0, 0});
}

TEST_CASE("these penalties pass over the prompt, the repetition penalty does not") {
  const std::vector<float> logits = {2.0F, 1.9F};
  CHECK(greedy({.presence_penalty = 2.0F}, logits, 1, {0}) == std::vector<int32_t>{0});
  CHECK(greedy({.repetition_penalty = 2.0F}, logits, 1, {0}) == std::vector<int32_t>{1});
}

TEST_CASE("a bias is added to the logit of its token") {
  const std::vector<float> logits = {2.0F, 1.9F, 1.8F};
  CHECK(greedy({.logit_bias = {{2, 0.3F}}}, logits, 1) == std::vector<int32_t>{2});
  CHECK(greedy({.logit_bias = {{0, -100.0F}}}, logits, 1) == std::vector<int32_t>{1});
  const std::vector<float> equal = {0, 0};
  Sampler sampler({.temperature = 1, .seed = 1, .logit_bias = {{1, std::log(3.0F)}}}, 2, {});
  int ones = 0;
  for (int i = 0; i < 4000; ++i) ones += sampler.draw(equal).id;
  CHECK(std::abs(ones / 4000.0 - 0.75) < 5 * std::sqrt(0.75 * 0.25 / 4000));
}

TEST_CASE("parameters out of range name themselves") {
  const auto refuses = [](const SamplingParams& params, const std::string& name) {
    CHECK_THROWS_WITH_AS(helm::check_sampling(params, ""), doctest::Contains(name.c_str()),
                         helm::Error);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {2.1F, -2.1F, nan}) {
    refuses({.presence_penalty = bad}, "presence_penalty");
    refuses({.frequency_penalty = bad}, "frequency_penalty");
  }
  for (const float bad : {100.5F, -101.0F, nan}) refuses({.logit_bias = {{0, bad}}}, "logit_bias");
  for (const int32_t id : {-1, 4}) {
    CHECK_THROWS_WITH_AS(Sampler({.logit_bias = {{id, 1.0F}}}, 4, {}),
                         doctest::Contains("outside the vocabulary"), helm::Error);
  }
}

TEST_CASE("a token outside the mask is never drawn, whatever its logit and the parameters") {
  constexpr size_t kVocab = 1090;  // no whole number of words
  std::vector<float> logits = random_logits(kVocab, 6);
  for (const int32_t id : {3, 32, 1089}) logits[static_cast<size_t>(id)] = 30.0F;
  const std::vector<int32_t> allowed = {0, 31, 33, 64, 700, 1088};
  const std::vector<SamplingParams> cases = {
      {},
      {.temperature = 1},
      {.temperature = 3e38F},
      {.temperature = 1e30F, .top_p = 0.999999F},
      {.temperature = 9, .top_k = 50},
      {.temperature = 9, .top_k = 1000, .top_p = 0.99F},
      {.temperature = 5, .top_p = 0.9F},
      {.temperature = 5, .min_p = 1e-6F},
      {.temperature = 1, .repetition_penalty = 3.0F, .seed = 4, .presence_penalty = -2},
      {.temperature = 1, .logit_bias = {{3, 100.0F}, {32, 100.0F}}}};
  for (const SamplingParams& params : cases) {
    Sampler sampler(params, kVocab, {}, std::make_shared<Allowing>(allowed));
    std::map<int32_t, int> drawn;
    for (int i = 0; i < 300; ++i) ++drawn[sampler.draw(logits).id];
    for (const auto& [id, count] : drawn) {
      CHECK(std::count(allowed.begin(), allowed.end(), id) == 1);
    }
    if (params.temperature > 4 && params.temperature < 10 && params.top_p == 1) {
      CHECK(drawn.size() == allowed.size());
    }
  }
}

TEST_CASE("a mask of everything changes no draw; log-probabilities know no mask") {
  const std::vector<float> logits = random_logits(100, 2);
  std::vector<int32_t> everything;
  for (int32_t id = 0; id < 100; ++id) everything.push_back(id);
  const SamplingParams params{.temperature = 1, .seed = 2, .logprobs = 1};
  Sampler free(params, 100, {});
  Sampler masked(params, 100, {}, std::make_shared<Allowing>(everything));
  Sampler narrow(params, 100, {}, std::make_shared<Allowing>(std::vector<int32_t>{50}));
  for (int i = 0; i < 50; ++i) CHECK(free.draw(logits).id == masked.draw(logits).id);
  const Sampler::Draw draw = narrow.draw(logits);
  CHECK(draw.id == 50);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  CHECK(std::abs(draw.logprob - (logits[50] - std::log(sum))) < 1e-5);
  CHECK(draw.top[0].first == std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST_CASE("no allowed token, or none of a finite logit, is an error") {
  std::vector<float> logits = {1, 2, 3};
  Sampler none({}, 3, {}, std::make_shared<Allowing>(std::vector<int32_t>{}));
  CHECK_THROWS_WITH_AS(none.draw(logits), doctest::Contains("allows no token"), helm::Error);
  logits[1] = -std::numeric_limits<float>::infinity();
  Sampler infinite({}, 3, {}, std::make_shared<Allowing>(std::vector<int32_t>{1}));
  CHECK_THROWS_WITH_AS(infinite.draw(logits), doctest::Contains("finite logit"), helm::Error);
}
