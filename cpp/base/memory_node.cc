#include "base/memory_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>

namespace helm {

int bind_memory(void* memory, int64_t bytes, int node) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  if (node < 0 || node >= kMostNodes) return EINVAL;
  std::array<unsigned long, kMostNodes / kBits> mask{};
  mask[static_cast<size_t>(node / kBits)] = 1UL << (node % kBits);
  // The system takes one bit less than it is told of.
  const long status = syscall(SYS_mbind, memory, static_cast<unsigned long>(bytes), MPOL_BIND,
                              mask.data(), static_cast<unsigned long>(kMostNodes) + 1, 0U);
  return status == 0 ? 0 : errno;
}

}  // namespace helm
