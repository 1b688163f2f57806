// Which kernel tier this process runs. Knows nothing of what the kernels compute.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace helm::cpu {

// Ordered: each tier contains the ones before it.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16 };
inline constexpr int kIsas = 4;

const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512bf16"

// One tier on this machine, for reports.
struct IsaStatus {
  Isa isa;
  bool available;
  std::string reason;  // why not, or what makes it available
};
std::vector<IsaStatus> isa_report();

// The table of a tier, or null where the processor, the operating system or the build lacks it.
const KernelTable* kernels_of(Isa isa);

// The best tier, or the one that the environment variable HELM_CPU_ISA names: a lower one keeps f32
// what a higher one rounds (KernelTable::activations). Throws Error{kInvalid} for an unknown name
// or a tier the machine lacks. `why`, if given, takes one line that says how the choice was made.
const KernelTable& select_kernels(std::string* why = nullptr);

}  // namespace helm::cpu
