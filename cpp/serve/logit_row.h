// Arithmetic over one row of logits, in vectors that every x86-64 has: results are equal on all.
// Knows nothing of sampling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace helm {

struct Candidate {
  float logit;
  int32_t id;
};

// Whether `a` is likelier, or as likely with a smaller id.
inline bool likelier(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// x(at) is the first of the largest; NaN if any x(i) is.
struct Largest {
  float value;
  size_t at;
};
Largest largest(std::span<const float> x);

// out(i) = exp((x(i) - most) / temperature) for x(i) <= most, 0 from exp(-87) down; within 3 ulp.
void weigh(std::span<const float> x, float most, float temperature, std::span<float> out);

// sum_i exp((x(i) - most) / temperature)
double sum_weights(std::span<const float> x, float most, float temperature);

// Those of at least `least`, by id.
std::vector<Candidate> at_least(std::span<const float> x, float least);

// The k that likelier() puts first, or all, by id.
std::vector<Candidate> likeliest(std::span<const float> x, size_t k);

}  // namespace helm
