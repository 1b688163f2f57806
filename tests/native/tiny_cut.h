// Cuts units of a tiny model between the CPU and the accelerator, as Python does with real ones.
#pragma once

#include <nlohmann/json.hpp>

#include "tiny_model.h"

namespace helm::test {

// Replaces the units that `shape` cuts, with their tensors, values and KV layers.
void cut_units(nlohmann::json* plan, const TinyShape& shape);

}  // namespace helm::test
