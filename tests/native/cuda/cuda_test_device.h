// The CUDA device that the tests of this executable use: emulated, or a GPU through the plugin.
#pragma once

#include <memory>

#include "device/device.h"

namespace helm::test {

std::unique_ptr<Device> open_cuda_test_device(int64_t limit_bytes);

}  // namespace helm::test
