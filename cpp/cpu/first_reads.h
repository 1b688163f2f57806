// What a member of a team reads first in an op, known before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace helm::cpu {

// Stretches in the order in which they are read, as far as a core's caches hold them until then.
class FirstReads {
 public:
  // Returns whether there is room for more.
  bool add(const void* at, int64_t bytes) {
    stretches_[count_++] = {static_cast<const std::byte*>(at), bytes};
    bytes_ += bytes;
    return count_ < stretches_.size() && bytes_ < kMostBytes;
  }
  // For a product. They are taken off.
  ReadAfter list() { return {stretches_.data(), stretches_.data() + count_}; }

 private:
  static constexpr int64_t kMostBytes = int64_t{2} << 20;

  std::array<ReadAfter::Stretch, 128> stretches_;
  size_t count_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace helm::cpu
