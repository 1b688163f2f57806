// The kernel tables this machine can run.
#pragma once

#include <memory>
#include <vector>

#include "cpu/isa.h"
#include "support/check.h"

namespace helm::test {

inline constexpr DType kAllTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
inline constexpr DType kKvTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kI8};

const std::vector<const cpu::KernelTable*>& tiers();

inline int index_of(DType dtype) {
  return static_cast<int>(dtype);
}

// Scratch of exactly the size the table asks for, guarded.
class Scratch {
 public:
  Scratch(const cpu::KernelTable& table, int64_t head_dim);
  void* data() const { return bytes_.data(); }
  bool intact() const { return bytes_.intact(); }

 private:
  GuardedBytes bytes_;
};

}  // namespace helm::test
