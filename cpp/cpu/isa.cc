// Detects instruction sets by CPUID and, for register state, by what the operating system saves.
#include "cpu/isa.h"

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace helm::cpu {
namespace {

#if defined(__x86_64__)
struct Feature {
  const char* name;
  bool present;
};

struct Regs {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Regs cpuid(uint32_t leaf, uint32_t subleaf) {
  Regs r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // zeros if there is no leaf
  return r;
}

bool bit(uint32_t word, int index) {
  return (word >> index) & 1;
}

// XCR0: which register state the operating system saves. Readable only with OSXSAVE.
uint64_t saved_state(const Regs& leaf1) {
  if (!bit(leaf1.ecx, 27)) return 0;
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Names what is missing of a tier and of the tiers below it; empty if nothing is.
std::string missing(Isa isa) {
  const Regs leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  const uint64_t state = saved_state(leaf1);
  std::string out;
  const auto require = [&out](std::initializer_list<Feature> features) {
    for (const Feature& f : features) {
      if (!f.present) out += (out.empty() ? "" : ", ") + std::string(f.name);
    }
  };
  if (isa >= Isa::kAvx2) {
    require({{"AVX2", bit(leaf7.ebx, 5)},
             {"FMA", bit(leaf1.ecx, 12)},
             {"F16C", bit(leaf1.ecx, 29)},
             {"AVX state saved by the operating system", (state & 0x6) == 0x6}});
  }
  if (isa >= Isa::kAvx512) {
    require({{"AVX512F", bit(leaf7.ebx, 16)},
             {"AVX512DQ", bit(leaf7.ebx, 17)},
             {"AVX512BW", bit(leaf7.ebx, 30)},
             {"AVX512VL", bit(leaf7.ebx, 31)},
             {"AVX-512 state saved by the operating system", (state & 0xe6) == 0xe6}});
  }
  if (isa >= Isa::kAvx512Bf16) require({{"AVX512_BF16", bit(leaf7_1.eax, 5)}});
  return out;
}
#else
std::string missing(Isa isa) {
  return isa == Isa::kScalar ? "" : "an x86-64 processor";
}
#endif

const KernelTable* compiled(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return kernels_scalar();
    case Isa::kAvx2:
      return kernels_avx2();
    case Isa::kAvx512:
      return kernels_avx512();
    case Isa::kAvx512Bf16:
      return kernels_avx512bf16();
  }
  return nullptr;
}

std::string available_names() {
  std::string names;
  for (const IsaStatus& s : isa_report()) {
    if (s.available) names += (names.empty() ? "" : ", ") + std::string(isa_name(s.isa));
  }
  return names;
}

[[noreturn]] void refuse(std::string_view asked, const std::string& why) {
  throw Error(ErrorKind::kInvalid, "[cpu] HELM_CPU_ISA=" + std::string(asked) + ": " + why +
                                       "; set it to one of " + available_names() +
                                       ", or unset it for the best");
}

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* kNames[kIsas] = {"scalar", "avx2", "avx512", "avx512bf16"};
  return kNames[static_cast<int>(isa)];
}

std::vector<IsaStatus> isa_report() {
  std::vector<IsaStatus> report;
  for (int i = 0; i < kIsas; ++i) {
    const Isa isa = static_cast<Isa>(i);
    const std::string lacks = missing(isa);
    if (!lacks.empty()) {
      report.push_back({isa, false, "the machine lacks " + lacks});
    } else if (compiled(isa) == nullptr) {
      report.push_back({isa, false, "this build does not contain it"});
    } else {
      report.push_back({isa, true, "supported by processor, operating system and build"});
    }
  }
  return report;
}

const KernelTable* kernels_of(Isa isa) {
  return missing(isa).empty() ? compiled(isa) : nullptr;
}

const KernelTable& select_kernels(std::string* why) {
  const char* asked = std::getenv("HELM_CPU_ISA");
  if (asked != nullptr && *asked != '\0') {
    for (const IsaStatus& s : isa_report()) {
      if (std::string_view(asked) != isa_name(s.isa)) continue;
      if (!s.available) refuse(asked, s.reason);
      if (why) *why = std::string(asked) + ", asked for by HELM_CPU_ISA";
      return *compiled(s.isa);
    }
    refuse(asked, "no such tier");
  }
  for (int i = kIsas - 1; i > 0; --i) {
    const Isa isa = static_cast<Isa>(i);
    const KernelTable* table = kernels_of(isa);
    if (table == nullptr) continue;
    if (why) *why = std::string(isa_name(isa)) + ", the best this machine and build support";
    return *table;
  }
  if (why) *why = "scalar, the only tier this machine and build support";
  return *kernels_scalar();
}

}  // namespace helm::cpu
