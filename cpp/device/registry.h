// The accelerators that there are, by name. The only place that knows all kinds of devices.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace helm {

// See accelerator_info() in helm/machine.h for specifications and errors.
std::unique_ptr<Device> open_accelerator(const std::string& specification);

}  // namespace helm
