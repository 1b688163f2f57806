// How a plan's units form stages and what crosses between them. Allocates and runs nothing.
#pragma once

#include <span>
#include <vector>

#include "helm/plan.h"

namespace helm {

// By unit: whether the accelerator runs it. Where each unit lies, or, while the weights of blocks
// in host memory visit the accelerator, every block.
std::vector<bool> resident_units(const Plan& plan);
std::vector<bool> visiting_units(const Plan& plan);

// A longest run of units on one device.
struct StageSpan {
  bool on_accelerator = false;
  size_t begin = 0;  // units [begin, end)
  size_t end = 0;
  std::vector<ValueIndex> inputs;  // values that the stage before hands over

  std::span<const UnitSpec> units(const Plan& plan) const {
    return std::span(plan.units).subspan(begin, end - begin);
  }
};

// The stages when the accelerator runs `on_accelerator`. Throws Error{kInvalid} where a stage reads
// a value that the stage before it does not hold.
std::vector<StageSpan> stages_of(const Plan& plan, const std::vector<bool>& on_accelerator);

// By ValueIndex: whether any of the units, those with `chosen`, reads or writes it.
std::vector<bool> values_of(const Plan& plan, const std::vector<bool>& chosen);

// Tensors of those units in the order in which a step reads them, each once.
std::vector<TensorIndex> tensors_of(const Plan& plan, const std::vector<bool>& chosen);

// By KV layer: whether its attention lies on the accelerator. Throws Error{kInvalid} for a layer
// with attention on both devices.
std::vector<bool> accelerator_layers(const Plan& plan);

}  // namespace helm
