// Tells models of one architecture apart by their weights. Knows no files.
#pragma once

#include <string>

#include "device/device.h"
#include "helm/plan.h"
#include "weights/store.h"

namespace helm {

// A number in hex, made of a few elements of every tensor as placed: equal for the same weights in
// the same dtypes wherever they lie, different where training has changed a matrix. `kernels`
// are those that loaded them; `accelerator` is null for a plan without one.
std::string weights_digest(const Plan& plan, const Weights& weights,
                           const cpu::KernelTable& kernels, Device* accelerator);

}  // namespace helm
