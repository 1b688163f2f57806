// What the runtime finds on this machine: kernel tiers and measured ceilings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "helm/types.h"

namespace helm {

// One tier of vector kernels.
struct IsaTier {
  std::string name;  // "scalar", "avx2", "avx512", "avx512bf16"
  bool available;
  std::string reason;  // what makes it available, or what it lacks
};

struct IsaChoice {
  std::string name;
  std::string reason;
};

HELM_API std::vector<IsaTier> isa_tiers();

// The tier that engines use: the best available, or the lower one that HELM_CPU_ISA names. Throws
// Error{kInvalid} if HELM_CPU_ISA names an unknown tier or one the machine lacks.
HELM_API IsaChoice isa_choice();

// The most that `threads` read together from `bytes` of memory, bytes/s, trying for `seconds`.
HELM_API double stream_read_bytes_per_s(int threads, int64_t bytes, double seconds);

// The most f32 multiply-adds that `threads` do in registers, counted as two operations, FLOP/s.
HELM_API double fma_flops(int threads, double seconds);

}  // namespace helm
