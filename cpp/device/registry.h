// The accelerators that there are, by name. The only place that knows all kinds of devices.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

namespace helm {

// See accelerator_info() in helm/machine.h for specifications, cuBLAS and errors.
std::unique_ptr<Device> open_accelerator(const std::string& specification,
                                         const std::vector<std::string>& cublas_directories = {});

}  // namespace helm
