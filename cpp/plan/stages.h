// How a plan's units form stages and what crosses between them. Allocates and runs nothing.
#pragma once

#include <span>
#include <vector>

#include "helm/plan.h"

namespace helm {

// By unit: the device that runs it. Where each unit lies, or, while the weights of layers in host
// memory visit the first accelerator, that for those.
std::vector<DeviceIndex> resident_units(const Plan& plan);
std::vector<DeviceIndex> visiting_units(const Plan& plan);
// By unit: whether it lies elsewhere than it runs then.
std::vector<bool> visits_of(const Plan& plan);
// By unit: whether the accelerator that it lies on lacks some of its weights, which visit it from
// host memory in every step.
std::vector<bool> lacking_units(const Plan& plan);
// Whether steps with prompts may read weights that decoding does without: those that visit then,
// and those of more experts.
bool prompts_read_more(const Plan& plan);
// The first unit of a unit's layer, or itself where it is of none.
size_t layer_begin(const Plan& plan, size_t unit);
// The unit behind the layer of unit `begin`, or behind that unit where it is of none.
size_t layer_end(const Plan& plan, size_t begin);
// Which of `places` are the device.
std::vector<bool> units_on(DeviceIndex device, const std::vector<DeviceIndex>& places);

// By unit: whether those of its layer and kind, or of the head, run on several devices.
std::vector<bool> cut_units(const Plan& plan, const std::vector<DeviceIndex>& places);

// A longest run of units on one device, or a shorter one: cut units of one layer and kind are not
// in the same stage, since between them others are to be waited for.
struct StageSpan {
  struct Input {
    ValueIndex value;
    size_t from;  // the stage that wrote it last
  };

  DeviceIndex device = kCpu;
  size_t begin = 0;  // units [begin, end)
  size_t end = 0;
  std::vector<Input> inputs;  // values that come from other devices
  bool resumes = false;       // reads what is left on its device since an earlier stage

  std::span<const UnitSpec> units(const Plan& plan) const {
    return std::span(plan.units).subspan(begin, end - begin);
  }
};

// The stages when each unit runs on the device in its place.
std::vector<StageSpan> stages_of(const Plan& plan, const std::vector<DeviceIndex>& places);

// Null for a unit that has none.
const AttentionOp* attention_of(const UnitSpec& unit);

// Of a value in a step.
int64_t value_bytes(const Plan& plan, ValueIndex index, int64_t tokens, int64_t outputs);

// By ValueIndex: whether any of the units, those with `chosen`, reads or writes it.
std::vector<bool> values_of(const Plan& plan, const std::vector<bool>& chosen);

// Tensors of those units in the order in which a step reads them, each once.
std::vector<TensorIndex> tensors_of(const Plan& plan, const std::vector<bool>& chosen);

// Likewise those that a device holds: read by units there, or by any from the CPU's memory.
std::vector<TensorIndex> tensors_on(const Plan& plan, DeviceIndex device);

// By KV entry: where its attention lies.
std::vector<DeviceIndex> entry_devices(const Plan& plan);

}  // namespace helm
