// The timed cases of the kernel benchmark: one object per case, verified before it is timed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace helm::bench {

enum class Unit { kBytes, kFlops };

// One pass of a case does `work` bytes or flops.
class Case {
 public:
  virtual ~Case() = default;
  virtual void verify() = 0;    // throws Error if the kernel's result is wrong
  virtual double pass_s() = 0;  // runs once, returns seconds
  std::string name, tier, dtype;
  Unit unit = Unit::kBytes;
  double work = 0;
};

struct Machine {
  int threads;
  int layers;  // copies of one Qwen3-0.6B layer's matrices, so that decode reads memory
};

// Weights of all layers, shared by the cases of one dtype.
struct Weights;
std::shared_ptr<Weights> make_weights(DType dtype, const Machine& machine);

std::unique_ptr<Case> matmul_case(const cpu::KernelTable& table, DType dtype, int64_t tokens,
                                  std::shared_ptr<Weights> weights, const Machine& machine);
// Decode: one query over many spans of `keys` in all; prefill: `queries` causal queries.
std::unique_ptr<Case> attention_case(const cpu::KernelTable& table, DType dtype, int64_t queries,
                                     int64_t keys, const Machine& machine);

}  // namespace helm::bench
