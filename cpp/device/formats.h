// Whether a device has kernels for the weights that it is to hold. Header only: plugins include it.
#pragma once

#include "base/check.h"
#include "device/device.h"

namespace helm {

// `device`: its kind.
[[noreturn]] inline void refuse_format(const char* device, const Format& format) {
  fail(ErrorKind::kInvalid, "[", device, "] there are no kernels for weights in format ",
       format_name(format), "; make the plan anew with another dtype");
}

// Throws Error{kInvalid} for the first slice of the plan on its device `index` in a format that
// `device` does not take.
inline void check_formats(const Plan& plan, const Device& device, DeviceIndex index) {
  for (const SliceSpec& slice : plan.slices) {
    if (slice.device != index || device.takes(slice.format)) continue;
    const TensorSpec& tensor = plan.tensors[static_cast<size_t>(slice.tensor)];
    fail(ErrorKind::kInvalid, "[plan] tensor \"", tensor.name, "\" has format ",
         format_name(slice.format), " on the ",
         index == kCpu ? "CPU" : plan.devices[static_cast<size_t>(index)].name, ", and ",
         device.describe().name, " has no kernels for that; make the plan anew with another dtype");
  }
}

}  // namespace helm
