// Which experts of a mixture a token goes to. Knows no plan and no team.
#pragma once

#include <cstdint>

#include "helm/mixture_ops.h"

namespace helm::cpu {

// Writes a row of RouteOp's result. logits, bias: [experts], bias may be null. out: [2 * chosen].
// scratch: [route_scratch_floats(experts)].
void route(const RouteOp& op, const float* logits, int64_t experts, const float* bias, float* out,
           float* scratch);

constexpr int64_t route_scratch_floats(int64_t experts) {
  return 4 * experts;
}

}  // namespace helm::cpu
