#include "helm/speculation.h"

#include <algorithm>

#include "kv/cache.h"
#include "plan/stages.h"

namespace helm {

Drafter::~Drafter() = default;
std::vector<Draft> Drafter::propose_all(std::span<const DraftAsk> asks) {
  std::vector<Draft> drafts;
  for (const DraftAsk& ask : asks) {
    drafts.push_back(ask.most > 0 ? propose(ask.request, ask.tokens, ask.most) : Draft{});
  }
  return drafts;
}
void Drafter::forget(int64_t) {}
bool Drafter::takes_time() const {
  return false;
}
double Drafter::seconds(std::span<const DraftAsk>) const {
  return 0;
}
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
