// Finds integer products by CPUID, the environment and the build.
#include "cpu/integer_isa.h"

#include <cstdlib>
#include <string_view>

#include "base/check.h"

namespace helm::cpu {
namespace {

struct IntegerRow {
  const char* name;
  Isa tier;  // whose registers it takes
  const IntegerTable* (*table)();
};
constexpr IntegerRow kRows[kIntegerIsas] = {
    {"scalar", Isa::kScalar, integer_scalar},
    {"avx2", Isa::kAvx2, integer_avx2},
    {"avxvnni", Isa::kAvx2, integer_avxvnni},
    {"avx512vnni", Isa::kAvx512, integer_avx512vnni},
};

const IntegerRow& row_of(IntegerIsa isa) {
  return kRows[static_cast<int>(isa)];
}

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The tier that HELM_CPU_ISA names, or the last; a wrong name is refused by select_kernels.
Isa highest_tier() {
  const std::string_view asked = environment("HELM_CPU_ISA");
  for (int i = 0; i < kIsas; ++i) {
    if (asked == isa_name(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return Isa::kAmx;
}

// Why a table cannot be chosen; empty if it can.
std::string excluded(const IntegerStatus& status) {
  if (!status.available) return status.reason;
  const Isa highest = highest_tier();
  if (row_of(status.isa).tier <= highest) return "";
  return std::string("HELM_CPU_ISA=") + isa_name(highest) + " excludes it";
}

[[noreturn]] void refuse_integer(std::string_view asked, const std::string& why) {
  std::string names;
  for (const IntegerStatus& status : integer_report()) {
    if (excluded(status).empty()) {
      names += (names.empty() ? "" : ", ") + std::string(integer_name(status.isa));
    }
  }
  fail(ErrorKind::kInvalid, "[cpu] HELM_CPU_INT=", asked, ": ", why, "; set it to one of ", names,
       ", or unset it for the best");
}

}  // namespace

const char* integer_name(IntegerIsa isa) {
  return row_of(isa).name;
}

std::string missing(IntegerIsa isa, const CpuFacts& facts) {
  std::string lacks = missing(row_of(isa).tier, facts);
  const auto require = [&](const char* name, bool present) {
    if (!present) lacks += (lacks.empty() ? "" : ", ") + std::string(name);
  };
  if (isa == IntegerIsa::kAvxVnni) require("AVX_VNNI", facts.leaf7_1_eax >> 4 & 1);
  if (isa == IntegerIsa::kAvx512Vnni) require("AVX512_VNNI", facts.leaf7_ecx >> 11 & 1);
  return lacks;
}

std::vector<IntegerStatus> integer_report() {
  std::vector<IntegerStatus> report;
  for (int i = 0; i < kIntegerIsas; ++i) {
    const auto isa = static_cast<IntegerIsa>(i);
    const std::string lacks = missing(isa, cpu_facts());
    if (!lacks.empty()) {
      report.push_back({isa, false, "the machine lacks " + lacks});
    } else if (row_of(isa).table() == nullptr) {
      report.push_back({isa, false, "this build does not contain it"});
    } else {
      report.push_back({isa, true, "supported by processor, operating system and build"});
    }
  }
  return report;
}

const IntegerTable* integer_kernels_of(IntegerIsa isa) {
  return missing(isa, cpu_facts()).empty() ? row_of(isa).table() : nullptr;
}

const IntegerTable& select_integer_kernels(std::string* why) {
  const std::string_view asked = environment("HELM_CPU_INT");
  const IntegerTable* best = nullptr;
  for (const IntegerStatus& status : integer_report()) {
    const std::string excluding = excluded(status);
    if (asked == integer_name(status.isa)) {
      if (!excluding.empty()) refuse_integer(asked, excluding);
      if (why) *why = std::string(asked) + ", asked for by HELM_CPU_INT";
      return *row_of(status.isa).table();
    }
    if (excluding.empty()) best = row_of(status.isa).table();
  }
  if (!asked.empty()) refuse_integer(asked, "there are no such kernels");
  if (why) {
    *why = std::string(best->name) + ", the best this machine, this build and HELM_CPU_ISA allow";
  }
  return *best;
}

}  // namespace helm::cpu
