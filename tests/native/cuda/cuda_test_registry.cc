// Every specification opens the CUDA device of cuda_test_device.h: instead of
// cpp/device/registry.cc, so that whole engines run on the emulation, or through the plugin that
// was just built.
#include "device/registry.h"

#include "cuda_test_device.h"

namespace helm {

std::unique_ptr<Device> open_accelerator(const std::string&, const std::vector<std::string>&) {
  return test::open_cuda_test_device(0);
}

}  // namespace helm
