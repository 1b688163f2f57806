// Which products of many rows find their input narrowed by the op before them. Knows nothing of
// launches.
#pragma once

#include "helm/plan.h"

namespace helm::cuda {

// What an op writes for the product that follows it.
struct Narrowing {
  DType dtype = DType::kF32;  // of the matrix that the product takes; f32: nothing
  bool alone = false;         // nobody reads the f32 value where the copy is written
};

// `next` is an op of the unit. packed: the dtype that packed weights become for products of many
// rows.
Narrowing narrowing_between(const Plan& plan, const Op& op, const UnitSpec& unit, const Op& next,
                            DType packed);

}  // namespace helm::cuda
