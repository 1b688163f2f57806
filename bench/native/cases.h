// The timed cases of the kernel benchmark: one object per case, verified before it is timed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/quant/integer.h"
#include "probe/ceiling.h"

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
std::shared_ptr<Weights> make_weights(DType dtype, const Machine& machine, probe::Pages pages);
// bf16, compressed.
std::shared_ptr<Weights> make_compressed_weights(const Machine& machine);

std::unique_ptr<Case> matmul_case(const cpu::KernelTable& table, DType dtype, int64_t tokens,
                                  std::shared_ptr<Weights> weights, const Machine& machine);
// Packed weights of all layers, shared by the cases of one format.
struct PackedWeights;
std::shared_ptr<PackedWeights> make_packed_weights(const Format& format, const Machine& machine);
std::unique_ptr<Case> integer_case(const cpu::IntegerTable& table, const Format& format,
                                   int64_t tokens, std::shared_ptr<PackedWeights> weights,
                                   const Machine& machine);

// Prefill: `queries` causal queries over themselves.
std::unique_ptr<Case> prefill_attention_case(const cpu::KernelTable& table, DType dtype,
                                             int64_t queries, const Machine& machine);

struct DecodeShape {
  int64_t heads, kv_heads, head_dim;
  int64_t context;  // positions of each sequence
  int64_t sequences;
};
// Memory in which decode cases lay out their pages: far more than caches hold, filled once.
std::shared_ptr<const probe::Buffer> make_pages();
// Decode: the engine's own stage of attention layers, a token of each sequence a step.
std::unique_ptr<Case> decode_attention_case(const cpu::KernelTable& table, DType kv_dtype,
                                            const DecodeShape& shape,
                                            std::shared_ptr<const probe::Buffer> pages,
                                            const Machine& machine);

}  // namespace helm::bench
