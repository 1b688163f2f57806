#include "helm/speculation.h"

#include <algorithm>

namespace helm {
namespace {

// Whether KV pages of an accelerator's layers may lie in host memory.
bool kv_overflows(const Plan& plan) {
  if (plan.kv.layers == 0) return false;
  int64_t near_layers = 0, near_pages = 0;
  for (const UnitSpec& unit : plan.units) {
    near_layers += unit.kind == UnitKind::kAttention && unit.device != kCpu ? 1 : 0;
  }
  for (size_t device = 1; device < plan.pages.size(); ++device) near_pages += plan.pages[device];
  return near_layers > 0 && near_pages / near_layers < plan.kv.pages / plan.kv.layers;
}

}  // namespace

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
  if (kv_overflows(plan)) {
    return "KV pages of the accelerator's layers overflow to host memory, where a step of several "
           "tokens is computed in another way than one of a single token";
  }
  return "";
}

}  // namespace helm
