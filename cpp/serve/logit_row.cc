#include "serve/logit_row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace helm {
namespace {

constexpr size_t kLanes = 4;
using Floats __attribute__((vector_size(16))) = float;
using Ints __attribute__((vector_size(16))) = int32_t;
using Words __attribute__((vector_size(16))) = uint32_t;
constexpr float kNone = -std::numeric_limits<float>::infinity();

Floats all(float value) {
  return Floats{value, value, value, value};
}

Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}

// max_i x(i), NaN if any is. Element by element takes 2 ns each, a millisecond for a large
// vocabulary and a few sequences.
float block_largest(std::span<const float> x) {
  constexpr size_t kWays = 4;
  std::array<Floats, kWays> top;
  std::array<Ints, kWays> nan{};
  top.fill(all(kNone));
  size_t i = 0;
  for (; i + kWays * kLanes <= x.size(); i += kWays * kLanes) {
    for (size_t way = 0; way < kWays; ++way) {
      const Floats values = load(x.data() + i + way * kLanes);
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

// exp(x) = 2^n exp(r) with n the integer nearest to x / ln 2 and |r| <= ln(2) / 2, where Taylor's
// polynomial of degree 7 is exact to 1e-8. 0 where 2^n would be subnormal.
Floats exp_negative(Floats x) {
  constexpr float kRounds = 0x1.8p23F;  // added and subtracted, it rounds to an integer
  constexpr float kLn2High = 0x1.62ep-1F, kLn2Low = 0x1.0bfbe8p-15F;  // ln 2 in two parts
  const Ints normal = x > all(-87.0F);
  x = normal ? x : all(0.0F);
  const Floats shifted = x * all(1.44269504F) + all(kRounds);
  const Floats n = shifted - all(kRounds);
  const Floats r = (x - n * all(kLn2High)) - n * all(kLn2Low);
  Floats sum = all(1.0F / 5040);
  for (const float term : {1.0F / 720, 1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F}) {
    sum = sum * r + all(term);
  }
  Words bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000U;  // the low bits of the shifted number are n
  Floats power;
  std::memcpy(&power, &bits, sizeof(power));
  return normal ? sum * power : all(0.0F);
}

Floats weights_of(Floats x, float most, float temperature) {
  return exp_negative((x - all(most)) / all(temperature));
}

// The last ones, and lanes that weigh nothing.
Floats load_tail(std::span<const float> x) {
  Floats values = all(kNone);
  std::memcpy(&values, x.data(), x.size_bytes());
  return values;
}

// The k-th largest maximum of blocks of 64: at least k elements are as large. -inf where there are
// not so many blocks.
float reached_by(std::span<const float> x, size_t k) {
  constexpr size_t kBlock = 64;
  std::vector<float> tops;
  tops.reserve(x.size() / kBlock + 1);
  for (size_t i = 0; i < x.size(); i += kBlock) {
    tops.push_back(block_largest(x.subspan(i, std::min(kBlock, x.size() - i))));
  }
  if (k > tops.size()) return kNone;
  const auto place = tops.begin() + static_cast<int64_t>(k) - 1;
  std::nth_element(tops.begin(), place, tops.end(), std::greater<>());
  return *place;
}

}  // namespace

// Only the block that has it is searched for where it is.
Largest largest(std::span<const float> x) {
  constexpr size_t kBlock = 2048;
  Largest found{kNone, 0};
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

void weigh(std::span<const float> x, float most, float temperature, std::span<float> out) {
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) {
    const Floats weights = weights_of(load(x.data() + i), most, temperature);
    std::memcpy(out.data() + i, &weights, sizeof(weights));
  }
  if (i == x.size()) return;
  const Floats weights = weights_of(load_tail(x.subspan(i)), most, temperature);
  std::memcpy(out.data() + i, &weights, (x.size() - i) * sizeof(float));
}

double sum_weights(std::span<const float> x, float most, float temperature) {
  using Doubles __attribute__((vector_size(16))) = double;
  Doubles low{}, high{};
  const auto add = [&](Floats weights) {
    low += Doubles{weights[0], weights[1]};
    high += Doubles{weights[2], weights[3]};
  };
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) {
    add(weights_of(load(x.data() + i), most, temperature));
  }
  if (i < x.size()) add(weights_of(load_tail(x.subspan(i)), most, temperature));
  low += high;
  return low[0] + low[1];
}

std::vector<Candidate> at_least(std::span<const float> x, float least) {
  constexpr size_t kBlock = 4 * kLanes;
  std::vector<Candidate> found;
  const auto look = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (x[i] >= least) found.push_back({x[i], static_cast<int32_t>(i)});
    }
  };
  size_t i = 0;
  for (; i + kBlock <= x.size(); i += kBlock) {  // most blocks have none
    Ints any{};
    for (size_t lane = 0; lane < kBlock; lane += kLanes) {
      any |= load(x.data() + i + lane) >= all(least);
    }
    if ((any[0] | any[1] | any[2] | any[3]) != 0) look(i, i + kBlock);
  }
  look(i, x.size());
  return found;
}

std::vector<Candidate> likeliest(std::span<const float> x, size_t k) {
  if (k == 0) return {};
  std::vector<Candidate> found = at_least(x, reached_by(x, k));
  if (found.size() <= k) return found;
  std::vector<Candidate> order = found;
  const auto place = order.begin() + static_cast<int64_t>(k) - 1;
  std::nth_element(order.begin(), place, order.end(), likelier);
  std::erase_if(found, [last = *place](const Candidate& c) { return likelier(last, c); });
  return found;
}

}  // namespace helm
