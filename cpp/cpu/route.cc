#include "cpu/route.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace helm::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();

// Takes the first place of the greatest value. There is one that is not taken.
int64_t take_greatest(float* values, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isnan(values[i]) && (best < 0 || values[i] > values[best])) best = i;
  }
  values[best] = kTaken;
  return best;
}

// Softmax over all, rounded to f32 at the end.
void softmax(const float* logits, int64_t count, float* out) {
  const float most = *std::max_element(logits, logits + count);
  double sum = 0;
  for (int64_t e = 0; e < count; ++e) sum += std::exp(static_cast<double>(logits[e]) - most);
  for (int64_t e = 0; e < count; ++e) {
    out[e] = static_cast<float>(std::exp(static_cast<double>(logits[e]) - most) / sum);
  }
}

// Leaves of `choice` the groups that are kept; others become -inf.
void keep_groups(const RouteOp& op, int64_t experts, float* choice, float* best) {
  const int64_t size = experts / op.groups;
  for (int64_t g = 0; g < op.groups; ++g) {
    float* sorted = best + op.groups;
    std::copy_n(choice + g * size, size, sorted);
    std::partial_sort(sorted, sorted + op.group_best, sorted + size, std::greater<>());
    best[g] = 0;
    for (int64_t i = 0; i < op.group_best; ++i) best[g] += sorted[i];
  }
  float* kept = best + op.groups;  // [groups]
  std::fill_n(kept, op.groups, 0.0f);
  for (int64_t i = 0; i < op.groups_kept; ++i) {
    kept[take_greatest(best, op.groups)] = 1;
  }
  for (int64_t e = 0; e < experts; ++e) {
    if (kept[e / size] == 0) choice[e] = kLowest;
  }
}

// Of one choice the weight: the softmax, at its expert, over those not taken that are near it.
float near_weight(const RouteOp& op, const float* logits, const float* choice, int64_t experts,
                  int64_t chosen) {
  const float most = logits[chosen];
  double sum = 1;
  for (int64_t e = 0; e < experts; ++e) {
    const float below = (most - logits[e]) / std::max(std::abs(logits[e]), most);
    if (!std::isnan(choice[e]) && !(below > op.near)) {
      sum += std::exp(static_cast<double>(choice[e]) - most);
    }
  }
  return static_cast<float>(1 / sum);
}

bool broken(const float* logits, int64_t experts) {
  float most = kLowest;
  for (int64_t e = 0; e < experts; ++e) {
    if (std::isnan(logits[e])) return true;
    most = std::max(most, logits[e]);
  }
  return std::isinf(most);
}

}  // namespace

void route(const RouteOp& op, const float* logits, int64_t experts, const float* bias, float* out,
           float* scratch) {
  float *ids = out, *weights = out + op.chosen;
  if (broken(logits, experts)) {
    for (int64_t i = 0; i < op.chosen; ++i) {
      ids[i] = static_cast<float>(i);
      weights[i] = std::numeric_limits<float>::quiet_NaN();
    }
    return;
  }
  float *scores = scratch, *choice = scratch + experts;
  std::copy_n(logits, experts, scores);
  if (op.score == RouteScore::kSoftmax) softmax(logits, experts, scores);
  if (op.score == RouteScore::kSigmoid) {
    for (int64_t e = 0; e < experts; ++e) {
      scores[e] = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logits[e]))));
    }
  }
  std::copy_n(scores, experts, choice);
  if (bias != nullptr) {
    for (int64_t e = 0; e < experts; ++e) choice[e] += bias[e];
  }
  if (op.groups > 1) keep_groups(op, experts, choice, scratch + 2 * experts);
  const bool mixes = op.score == RouteScore::kSparsemixer;
  for (int64_t i = 0; i < op.chosen; ++i) {
    const int64_t e = take_greatest(choice, experts);
    ids[i] = static_cast<float>(e);
    weights[i] = mixes ? near_weight(op, logits, choice, experts, e) : scores[e];
  }
  // Ascending by id. There are few.
  for (int64_t i = 1; i < op.chosen; ++i) {
    for (int64_t j = i; j > 0 && ids[j] < ids[j - 1]; --j) {
      std::swap(ids[j], ids[j - 1]);
      std::swap(weights[j], weights[j - 1]);
    }
  }
  if (op.score == RouteScore::kSoftmaxSelected) softmax(weights, op.chosen, weights);
  double sum = op.normalise ? 0 : 1;
  for (int64_t i = 0; op.normalise && i < op.chosen; ++i) sum += weights[i];
  const double factor = op.normalise && sum <= 0 ? 0 : op.scale / sum;
  for (int64_t i = 0; i < op.chosen; ++i) weights[i] = static_cast<float>(weights[i] * factor);
}

}  // namespace helm::cpu
