// Placement of a plan's tensors in host memory: streamed from files to their final place, or used
// where they already lie. Never two copies.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "cpu/kernels/kernels.h"
#include "helm/engine.h"
#include "helm/plan.h"

namespace helm {

class Weights {
 public:
  // Reads with all members of `threads`. Throws Error{kIo} for a file that is missing or too short,
  // Error{kInvalid} for a bound tensor that does not fit the plan.
  Weights(const Plan& plan, const EngineOptions& options, const cpu::KernelTable& kernels,
          ThreadPool& threads);

  std::span<const void* const> data() const { return data_; }  // by TensorIndex
  int64_t bytes() const { return bytes_; }
  bool huge_pages() const { return arena_.huge_pages(); }

 private:
  std::vector<const void*> data_;              // by TensorIndex
  std::vector<std::shared_ptr<void>> owners_;  // of tensors used where they lie
  Arena arena_;
  int64_t bytes_ = 0;
};

}  // namespace helm
