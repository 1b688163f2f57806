// How a plan's tensors lie in the CPU's memory.
#pragma once

#include <cstdint>

#include "helm/plan.h"

namespace helm::cpu {

// Whether a tensor is compressed: a bf16 matrix that becomes smaller, where the plan asks for it.
bool is_compressed(const Plan& plan, const TensorSpec& tensor);
// What a tensor takes, and what of it a product of all its rows reads.
int64_t host_bytes(const Plan& plan, const TensorSpec& tensor);
int64_t read_bytes(const Plan& plan, const TensorSpec& tensor);

}  // namespace helm::cpu
