// How a plan's units form stages and what crosses between them. Allocates and runs nothing.
#pragma once

#include <span>
#include <vector>

#include "helm/plan.h"

namespace helm {

// A longest run of units on one device.
struct StageSpan {
  bool on_accelerator = false;
  std::span<const UnitSpec> units;
  std::vector<ValueIndex> inputs;  // values that the stage before hands over
};

// Throws Error{kInvalid} where a stage reads a value that the stage before it does not hold.
std::vector<StageSpan> stages_of(const Plan& plan);

// The units of one device, which need not lie side by side.
std::vector<UnitSpec> units_on(const Plan& plan, bool accelerator);

// By ValueIndex: whether any op of the units reads or writes it.
std::vector<bool> values_of(const Plan& plan, std::span<const UnitSpec> units);

// Tensors of the units in the order in which a step reads them, each once.
std::vector<TensorIndex> tensors_of(const Plan& plan, std::span<const UnitSpec> units);

// By KV layer: whether its attention runs on the accelerator. Throws Error{kInvalid} for a layer
// with attention on both devices.
std::vector<bool> accelerator_layers(const Plan& plan);

}  // namespace helm
