#include "helm/speculation.h"

#include <algorithm>

#include "kv/cache.h"
#include "plan/stages.h"

namespace helm {

Drafter::~Drafter() = default;
void Drafter::forget(int64_t) {}
double Drafter::expected(int32_t) const {
  return 0.5;
}

std::string speculation_obstacle(const Plan& plan) {
  if (std::min(plan.limits.step_outputs, plan.limits.step_tokens) < 2) {
    return "a step gives one row of logits (limits.step_outputs is " +
           std::to_string(plan.limits.step_outputs) + "), a guess needs a second one";
  }
  if (KvCache(plan, entry_devices(plan)).overflows()) {
    return "KV pages of the accelerator's layers overflow to host memory, where a step of several "
           "tokens is computed in another way than one of a single token";
  }
  return "";
}

}  // namespace helm
