// Which integer products this process runs. All give the same bits, so that the choice is one of
// speed alone. Knows nothing of what the kernels compute.
#pragma once

#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernels/quant/integer.h"

namespace helm::cpu {

// Ordered by preference, the last being the best.
enum class IntegerIsa : uint8_t { kScalar, kAvx2, kAvxVnni, kAvx512Vnni };
inline constexpr int kIntegerIsas = 4;

const char* integer_name(IntegerIsa isa);  // "scalar", "avx2", "avxvnni", "avx512vnni"

// Names what a machine lacks of these instructions; empty if nothing.
std::string missing(IntegerIsa isa, const CpuFacts& facts);

// One table on this machine, for reports.
struct IntegerStatus {
  IntegerIsa isa;
  bool available;
  std::string reason;  // why not, or what makes it available
};
std::vector<IntegerStatus> integer_report();

// Null where the processor, the operating system or the build lacks it.
const IntegerTable* integer_kernels_of(IntegerIsa isa);

// The best table within the tier that HELM_CPU_ISA names, if it names one, or the table that the
// environment variable HELM_CPU_INT names. Throws Error{kInvalid} for an unknown name, and for one
// that the machine lacks or that HELM_CPU_ISA excludes. `why`, if given, takes one line that says
// how the choice was made.
const IntegerTable& select_integer_kernels(std::string* why = nullptr);

}  // namespace helm::cpu
