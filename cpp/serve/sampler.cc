#include "serve/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace helm {
namespace {

// A uniform number in [0, 1) from the n-th state of the SplitMix64 sequence that `seed` starts
// (Steele, Lea and Flood 2014).
double uniform(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1.0p-53;
}

// x(at) is the first of the largest; NaN if any x(i) is.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  size_t at = 0;
};

// max_i x(i), NaN if any is. In vectors that every x86-64 has, which compilers do not find by
// themselves: element by element takes 2 ns each, a millisecond for a large vocabulary and a few
// sequences.
float block_largest(std::span<const float> x) {
  using Floats __attribute__((vector_size(16))) = float;
  using Ints __attribute__((vector_size(16))) = int32_t;
  constexpr size_t kLanes = 4, kWays = 4;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::array<Floats, kWays> top;
  std::array<Ints, kWays> nan{};
  top.fill(Floats{kNone, kNone, kNone, kNone});
  size_t i = 0;
  for (; i + kWays * kLanes <= x.size(); i += kWays * kLanes) {
    for (size_t way = 0; way < kWays; ++way) {
      Floats values;
      std::memcpy(&values, x.data() + i + way * kLanes, sizeof(values));
      top[way] = values > top[way] ? values : top[way];
      nan[way] |= values != values;
    }
  }
  float most = kNone;
  bool any_nan = false;
  for (; i < x.size(); ++i) {
    most = std::max(most, x[i]);
    any_nan = any_nan || std::isnan(x[i]);
  }
  for (size_t way = 0; way < kWays; ++way) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      most = std::max(most, top[way][lane]);
      any_nan = any_nan || nan[way][lane] != 0;
    }
  }
  return any_nan ? std::numeric_limits<float>::quiet_NaN() : most;
}

// Only the block that has it is searched for where it is.
Largest largest(std::span<const float> x) {
  constexpr size_t kBlock = 2048;
  Largest found;
  size_t block = 0;
  for (size_t i = 0; i < x.size(); i += kBlock) {
    const float most = block_largest(x.subspan(i, std::min(kBlock, x.size() - i)));
    if (std::isnan(most)) return {most, i};
    if (most > found.value) found.value = most, block = i;
  }
  found.at = static_cast<size_t>(
      std::find(x.begin() + static_cast<int64_t>(block), x.end(), found.value) - x.begin());
  return found;
}

double log_sum_exp(std::span<const float> logits, float max) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - max));
  return max + std::log(sum);
}

}  // namespace

void check_sampling(const SamplingParams& p, const std::string& where) {
  const auto require = [&](bool ok, const char* rule, double found) {
    if (!ok) fail(ErrorKind::kInvalid, where, rule, ", found ", found);
  };
  require(std::isfinite(p.temperature) && p.temperature >= 0,
          "temperature must be finite and at least 0", p.temperature);
  require(p.top_p > 0 && p.top_p <= 1, "top_p must lie in (0, 1]", p.top_p);
  require(p.min_p >= 0 && p.min_p <= 1, "min_p must lie in [0, 1]", p.min_p);
  require(p.top_k >= 0, "top_k must be at least 0", p.top_k);
  require(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0,
          "repetition_penalty must be finite and above 0", p.repetition_penalty);
  require(p.logprobs >= -1, "logprobs must be at least -1", p.logprobs);
}

Sampler::Sampler(const SamplingParams& params, int64_t vocab_size, std::span<const int32_t> context)
    : params_(params) {
  if (params_.repetition_penalty != 1) {
    seen_.resize(static_cast<size_t>(vocab_size), false);
    for (const int32_t id : context) {
      if (!seen_[static_cast<size_t>(id)]) seen_ids_.push_back(id);
      seen_[static_cast<size_t>(id)] = true;
    }
  }
}

Sampler::Draw Sampler::draw(std::span<const float> logits) {
  Draw draw{0, std::numeric_limits<float>::quiet_NaN(), {}};
  const auto [max, likeliest] = largest(logits);
  if (!std::isfinite(max)) {
    fail(ErrorKind::kInvalid, "[generate] the logits are not finite (", max,
         "); the weights hold NaN or infinity, or overflow in their dtype");
  }
  const bool greedy = params_.temperature == 0;
  if (greedy && params_.repetition_penalty == 1) {
    draw.id = static_cast<int32_t>(likeliest);
  } else {
    candidates_.resize(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) {
      candidates_[i] = {logits[i], static_cast<int32_t>(i)};
    }
    draw.id = choose();
    candidates_ = std::vector<Candidate>();  // those of many requests would add up
  }
  if (params_.logprobs >= 0) {
    const double norm = log_sum_exp(logits, max);
    draw.logprob = static_cast<float>(logits[static_cast<size_t>(draw.id)] - norm);
    std::vector<int32_t> order(logits.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    const auto count = std::min(static_cast<size_t>(params_.logprobs), order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(count), order.end(),
                      [&](int32_t a, int32_t b) {
                        const float la = logits[static_cast<size_t>(a)];
                        const float lb = logits[static_cast<size_t>(b)];
                        return la != lb ? la > lb : a < b;
                      });
    for (size_t i = 0; i < count; ++i) {
      const int32_t id = order[i];
      draw.top.emplace_back(id, static_cast<float>(logits[static_cast<size_t>(id)] - norm));
    }
  }
  if (params_.repetition_penalty != 1 && !seen_[static_cast<size_t>(draw.id)]) {
    seen_[static_cast<size_t>(draw.id)] = true;
    seen_ids_.push_back(draw.id);
  }
  ++draws_;
  return draw;
}

void Sampler::penalise() {
  for (const int32_t id : seen_ids_) {
    float& logit = candidates_[static_cast<size_t>(id)].logit;
    logit = logit > 0 ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
  }
}

void Sampler::keep_top_k() {
  const auto k = static_cast<size_t>(params_.top_k);
  if (k == 0 || k >= candidates_.size()) return;
  // Ties at the k-th place are broken by id, so that the result is deterministic.
  std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(k) - 1,
                   candidates_.end(), [](const Candidate& a, const Candidate& b) {
                     return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
                   });
  candidates_.resize(k);
}

int32_t Sampler::choose() {
  penalise();
  if (params_.temperature == 0) {
    return std::max_element(
               candidates_.begin(), candidates_.end(),
               [](const Candidate& a, const Candidate& b) { return a.logit < b.logit; })
        ->id;
  }
  keep_top_k();
  return sample();
}

// Top-p keeps the smallest set of most likely tokens whose probability reaches top_p; min-p then
// drops those below min_p times the largest. Candidates leave a heap in order of likelihood, so
// that only those that are kept get sorted.
int32_t Sampler::sample() {
  const auto less = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit < b.logit : a.id > b.id;
  };
  const float max = std::max_element(candidates_.begin(), candidates_.end(), less)->logit;
  const auto weight = [&](const Candidate& c) {
    return std::exp((c.logit - max) / params_.temperature);
  };
  double total = 0;
  for (const Candidate& candidate : candidates_) total += weight(candidate);

  size_t kept = candidates_.size();
  double kept_total = total;
  if (params_.top_p < 1 || params_.min_p > 0) {
    std::make_heap(candidates_.begin(), candidates_.end(), less);
    auto heap_end = candidates_.end();
    kept_total = 0;
    while (heap_end != candidates_.begin()) {
      const float next = weight(candidates_.front());
      const bool first = heap_end == candidates_.end();
      if (!first && (kept_total >= params_.top_p * total || next < params_.min_p)) break;
      std::pop_heap(candidates_.begin(), heap_end, less);
      --heap_end;
      kept_total += next;
    }
    kept = static_cast<size_t>(candidates_.end() - heap_end);
    std::rotate(candidates_.begin(), heap_end, candidates_.end());
  }
  const double target = uniform(params_.seed, draws_) * kept_total;
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) {
    sum += weight(candidates_[i]);
    if (sum > target) return candidates_[i].id;
  }
  return candidates_[kept - 1].id;  // rounding left the sum a little short of the target
}

}  // namespace helm
