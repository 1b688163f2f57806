// What a plan leaves on disk: which bytes of which files a step reads, unit by unit, and where they
// come to lie in the ring. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "helm/plan.h"

namespace helm {

// Reads begin and end at multiples of it, in files and in memory.
inline constexpr int64_t kDiskAlignment = 4096;

// What is read of a file at once, of tensors that touch. Only the first `needed` bytes must be
// there: a file may end behind them.
struct DiskRange {
  std::string file;
  int64_t offset = 0;
  int64_t bytes = 0;
  int64_t needed = 0;
  int64_t place = 0;  // in the ring
};

// A unit with tensors on disk. `frees`: its read may begin once that of so many reads before it was
// used, counted around from step to step; those lie where it comes to lie.
struct DiskUnit {
  size_t unit = 0;
  int64_t place = 0;  // in the ring
  int64_t bytes = 0;
  size_t frees = 1;
  std::vector<DiskRange> ranges = {};
  std::vector<std::pair<TensorIndex, int64_t>> tensors = {};  // and where each begins in the ring
};

struct DiskLayout {
  std::vector<DiskUnit> units;  // in the order in which steps run them
  int64_t step_bytes = 0;       // that each step reads

  // Of the unit with that number, or null.
  const DiskUnit* of(size_t unit) const;
};

// The ring of the plan's schedule holds every unit.
DiskLayout disk_layout(const Plan& plan);

}  // namespace helm
