// Which isa this process runs. Knows nothing of what the kernels compute.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace helm::cpu {

// Ordered: each tier contains the ones before it.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr int kIsas = 5;

const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512bf16", "amx"

// What an x86-64 processor and the operating system say of themselves.
struct CpuFacts {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf7_1_eax = 0;  // CPUID
  uint64_t saved_state = 0;  // XCR0: which registers the operating system saves
  std::string tile_refusal;  // why the kernel refuses this process tile registers, if it does
};

const CpuFacts& cpu_facts();  // of this machine

// Names what is missing of a tier and of the tiers below it; empty if nothing is.
std::string missing(Isa isa, const CpuFacts& facts);

// One tier on this machine, for reports.
struct IsaStatus {
  Isa isa;
  bool available;
  std::string reason;  // why not, or what makes it available
};
std::vector<IsaStatus> isa_report();

// The table of a tier, or null where the processor, the operating system or the build lacks it.
const KernelTable* kernels_of(Isa isa);

// The best tier up to avx512bf16, or the one that the environment variable HELM_CPU_ISA names: a
// lower one keeps f32 what a higher one rounds (KernelTable::activations). Throws Error{kInvalid}
// for an unknown name or a tier the machine lacks. `why`, if given, takes one line that says how
// the choice was made.
const KernelTable& select_kernels(std::string* why = nullptr);

}  // namespace helm::cpu
