#include "serve/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace helm {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// A uniform number in [0, 1) from the n-th state of the SplitMix64 sequence that `seed` starts
// (Steele, Lea and Flood 2014).
double uniform(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1.0p-53;
}

// The first place up to which `weights` sum to more than `target`; where rounding left the sum a
// little short of it, the last that weighs anything.
size_t reach(std::span<const float> weights, double target) {
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    sum += weights[i];
    if (sum > target) return i;
    if (weights[i] > 0) last = i;
  }
  return last;
}

std::vector<float> weights_of(std::span<const Candidate> candidates, float most,
                              float temperature) {
  std::vector<float> weights(candidates.size());
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = candidates[i].logit;
  weigh(weights, most, temperature, weights);
  return weights;
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
  require(std::abs(p.presence_penalty) <= 2, "presence_penalty must lie in [-2, 2]",
          p.presence_penalty);
  require(std::abs(p.frequency_penalty) <= 2, "frequency_penalty must lie in [-2, 2]",
          p.frequency_penalty);
  for (const auto& [id, bias] : p.logit_bias) {
    require(std::abs(bias) <= 100, "logit_bias must lie in [-100, 100]", bias);
  }
}

Sampler::Sampler(const SamplingParams& params, int64_t vocab_size, std::span<const int32_t> context,
                 std::shared_ptr<TokenConstraint> constraint)
    : params_(params), vocab_size_(vocab_size), constraint_(std::move(constraint)) {
  for (const auto& [id, bias] : params_.logit_bias) {
    if (id >= 0 && id < vocab_size) continue;
    fail(ErrorKind::kInvalid, "[generate] logit_bias names token ", id,
         ", outside the vocabulary of ", vocab_size);
  }
  if (params_.repetition_penalty != 1) {
    seen_.resize(static_cast<size_t>(vocab_size), false);
    for (const int32_t id : context) {
      if (!seen_[static_cast<size_t>(id)]) seen_ids_.push_back(id);
      seen_[static_cast<size_t>(id)] = true;
    }
  }
}

void Sampler::prepare() noexcept {
  if (constraint_ == nullptr || prepared_) return;
  prepared_ = true;
  try {
    allowed_.assign(static_cast<size_t>((vocab_size_ + 31) / 32), 0);
    constraint_->mask(allowed_);
    if (std::all_of(allowed_.begin(), allowed_.end(), [](uint32_t word) { return word == 0; })) {
      fail(ErrorKind::kInvalid,
           "[generate] the constraint allows no token here; its grammar cannot be met with this "
           "model's tokens");
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

Sampler::Draw Sampler::draw(std::span<const float> logits, Scratch& scratch) {
  Draw draw{0, std::numeric_limits<float>::quiet_NaN(), {}, {}};
  prepare();
  if (failure_) std::rethrow_exception(failure_);
  const Largest top = largest(logits);
  if (!std::isfinite(top.value)) {
    fail(ErrorKind::kInvalid, "[generate] the logits are not finite (", top.value,
         "); the weights hold NaN or infinity, or overflow in their dtype");
  }
  if (changes_logits()) {
    const std::span<const float> row = changed(logits, scratch);
    const Largest top_of_changed = largest(row);
    if (!std::isfinite(top_of_changed.value)) {
      fail(ErrorKind::kInvalid, "[generate] no token that may come next has a finite logit (",
           top_of_changed.value, ")");
    }
    draw.id = choose(row, top_of_changed);
  } else {
    draw.id = choose(logits, top);
  }
  if (params_.logprobs >= 0) report(logits, top.value, draw);
  take(draw.id);
  // What follows without a draw has no probability to report.
  if (constraint_ != nullptr && params_.logprobs < 0 && !constraint_->is_stopped()) {
    draw.forced = constraint_->forced();
    for (const int32_t id : draw.forced) take(id);
  }
  return draw;
}

void Sampler::take(int32_t id) {
  if (id < 0 || id >= vocab_size_) {
    fail(ErrorKind::kInvalid, "[generate] the constraint forces token ", id,
         ", outside the vocabulary of ", vocab_size_);
  }
  if (params_.repetition_penalty != 1 && !seen_[static_cast<size_t>(id)]) {
    seen_[static_cast<size_t>(id)] = true;
    seen_ids_.push_back(id);
  }
  if (params_.presence_penalty != 0 || params_.frequency_penalty != 0) ++counts_[id];
  if (constraint_ != nullptr) constraint_->commit(id);
  prepared_ = false;
  ++draws_;
}

bool Sampler::changes_logits() const {
  return constraint_ != nullptr || !seen_ids_.empty() || !counts_.empty() ||
         !params_.logit_bias.empty();
}

// The row with what lowers, raises and forbids tokens.
std::span<const float> Sampler::changed(std::span<const float> logits, Scratch& scratch) const {
  scratch.assign(logits.begin(), logits.end());
  const auto at = [&](int32_t id) -> float& { return scratch[static_cast<size_t>(id)]; };
  for (const int32_t id : seen_ids_) {
    const float logit = at(id);
    at(id) = logit > 0 ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
  }
  for (const auto& [id, count] : counts_) {
    at(id) -= params_.presence_penalty + params_.frequency_penalty * static_cast<float>(count);
  }
  for (const auto& [id, bias] : params_.logit_bias) at(id) += bias;
  if (constraint_ != nullptr) forbid(scratch);
  return scratch;
}

void Sampler::forbid(std::span<float> row) const {
  for (size_t word = 0; word < allowed_.size(); ++word) {
    const uint32_t bits = allowed_[word];
    if (bits == ~uint32_t{0}) continue;
    const size_t begin = word * 32, end = std::min(begin + 32, row.size());
    if (bits == 0) {
      std::fill(row.begin() + static_cast<int64_t>(begin), row.begin() + static_cast<int64_t>(end),
                kNever);
      continue;
    }
    for (size_t i = begin; i < end; ++i) {
      if ((bits >> (i - begin) & 1) == 0) row[i] = kNever;
    }
  }
}

int32_t Sampler::choose(std::span<const float> row, Largest top) const {
  if (params_.temperature == 0) return static_cast<int32_t>(top.at);
  const auto k = static_cast<size_t>(params_.top_k);
  if (k > 0 && k < row.size()) {
    std::vector<Candidate> candidates = likeliest(row, k);
    std::erase_if(candidates, [](const Candidate& c) { return c.logit == kNever; });
    if (params_.top_p == 1 && params_.min_p == 0) return choose_of(candidates, top.value);
    double total = 0;
    for (const float weight : weights_of(candidates, top.value, params_.temperature)) {
      total += weight;
    }
    return choose_of_likeliest(std::move(candidates), total, top.value);
  }
  if (params_.top_p < 1 || params_.min_p > 0) return choose_likely(row, top.value);
  return choose_of_all(row, top.value);
}

double Sampler::target() const {
  return uniform(params_.seed, draws_);
}

// Block by block, then within the one that the target falls into.
int32_t Sampler::choose_of_all(std::span<const float> row, float most) const {
  constexpr size_t kBlock = 1024;
  std::vector<double> sums;
  double total = 0;
  for (size_t i = 0; i < row.size(); i += kBlock) {
    sums.push_back(
        sum_weights(row.subspan(i, std::min(kBlock, row.size() - i)), most, params_.temperature));
    total += sums.back();
  }
  double left = target() * total;
  size_t block = 0, last = 0;
  for (; block < sums.size() && left >= sums[block]; ++block) {
    left -= sums[block];
    if (sums[block] > 0) last = block;
  }
  if (block == sums.size()) block = last, left = sums[last];
  const size_t begin = block * kBlock;
  std::array<float, kBlock> weights;
  const std::span<const float> values = row.subspan(begin, std::min(kBlock, row.size() - begin));
  const std::span<float> kept = std::span(weights).first(values.size());
  weigh(values, most, params_.temperature, kept);
  return static_cast<int32_t>(begin + reach(kept, left));
}

// All tokens of less than (1 - top_p) / vocab of the total weight have less than 1 - top_p of it
// together, and those of less than min_p of the largest are dropped in any case: no list of the
// vocabulary is made for the few that are left.
int32_t Sampler::choose_likely(std::span<const float> row, float most) const {
  const double total = sum_weights(row, most, params_.temperature);
  const double share = (1 - static_cast<double>(params_.top_p)) / static_cast<double>(row.size());
  const double least = std::max(share * total, static_cast<double>(params_.min_p));
  constexpr double kRounding = 1e-3;  // of the logarithm: a few more do no harm
  const double logit = most + params_.temperature * (std::log(least) - kRounding);
  const float bound = static_cast<float>(
      std::max(logit, static_cast<double>(std::numeric_limits<float>::lowest())));
  return choose_of_likeliest(at_least(row, bound), total, most);
}

// In the order given.
int32_t Sampler::choose_of(std::span<const Candidate> candidates, float most) const {
  const std::vector<float> weights = weights_of(candidates, most, params_.temperature);
  double total = 0;
  for (const float weight : weights) total += weight;
  return candidates[reach(weights, target() * total)].id;
}

// Top-p keeps the smallest set of most likely tokens whose probability reaches top_p; min-p then
// drops those below min_p times the largest. Candidates leave a heap in order of likelihood, so
// that only those that are kept get sorted. The least likely comes first in the draw.
int32_t Sampler::choose_of_likeliest(std::vector<Candidate> candidates, double total,
                                     float most) const {
  const auto later = [](const Candidate& a, const Candidate& b) { return likelier(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), later);
  auto end = candidates.end();
  double mass = 0;
  while (end != candidates.begin()) {
    float next = candidates.front().logit;
    weigh({&next, 1}, most, params_.temperature, {&next, 1});
    const bool first = end == candidates.end();
    if (!first && (mass >= params_.top_p * total || next < params_.min_p)) break;
    std::pop_heap(candidates.begin(), end, later);
    --end;
    mass += next;
  }
  return choose_of({end, candidates.end()}, most);
}

void Sampler::report(std::span<const float> logits, float most, Draw& draw) const {
  const double norm = most + std::log(sum_weights(logits, most, 1));
  draw.logprob = static_cast<float>(logits[static_cast<size_t>(draw.id)] - norm);
  std::vector<Candidate> top = likeliest(logits, static_cast<size_t>(params_.logprobs));
  std::sort(top.begin(), top.end(), likelier);
  for (const auto& [logit, id] : top) {
    draw.top.emplace_back(id, static_cast<float>(logit - norm));
  }
}

}  // namespace helm
