// Host memory that others own, page-locked for copies to and from a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"

namespace helm {

// Unlocks all of it on destruction, before which the copies must be done.
class PinnedMemory {
 public:
  explicit PinnedMemory(Device& device) : device_(device) {}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  // Stretches in any order; those with a memory page in common are locked as one, as no page can be
  // locked twice. written: the device writes there, too.
  void lock(std::vector<std::span<const std::byte>> stretches, bool written);
  // Of what was to be locked, what could not be: copies of that are slower.
  int64_t refused_bytes() const { return refused_bytes_; }

 private:
  Device& device_;
  std::vector<const std::byte*> locked_;
  int64_t refused_bytes_ = 0;
};

}  // namespace helm
