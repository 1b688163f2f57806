// Detects instruction sets by CPUID and, for register state, by what the operating system saves.
#include "cpu/isa.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace helm::cpu {
namespace {

bool bit(uint64_t word, int index) {
  return (word >> index) & 1;
}

bool has_all(uint64_t word, uint64_t mask) {
  return (word & mask) == mask;
}

// Bits of CPUID's leaf 7, EDX, and of XCR0.
constexpr int kAmxBf16 = 22, kAmxTile = 24;
constexpr uint64_t kTileState = 0x60000;

#if defined(__x86_64__)
struct Regs {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Regs cpuid(uint32_t leaf, uint32_t subleaf) {
  Regs r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // zeros if there is no leaf
  return r;
}

// XCR0: which register state the operating system saves. Readable only with OSXSAVE.
uint64_t saved_state(const Regs& leaf1) {
  if (!bit(leaf1.ecx, 27)) return 0;
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// The kernel gives tile registers, 8 KiB of state per thread, to processes that ask for them.
std::string ask_for_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; since Linux 5.16
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::strerror(errno);
#else
  return "HELM asks only Linux for it";
#endif
}

CpuFacts read_facts() {
  const Regs leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0);
  CpuFacts facts;
  facts.leaf1_ecx = leaf1.ecx;
  facts.leaf7_ebx = leaf7.ebx;
  facts.leaf7_ecx = leaf7.ecx;
  facts.leaf7_edx = leaf7.edx;
  facts.leaf7_1_eax = cpuid(7, 1).eax;
  facts.saved_state = saved_state(leaf1);
  if (bit(leaf7.edx, kAmxTile) && has_all(facts.saved_state, kTileState)) {
    facts.tile_refusal = ask_for_tiles();
  }
  return facts;
}

std::string missing(Isa isa) {
  return missing(isa, cpu_facts());
}
#else
CpuFacts read_facts() {
  return {};
}

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
    case Isa::kAmx:
      return kernels_amx();
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

const CpuFacts& cpu_facts() {
  static const CpuFacts facts = read_facts();  // asks the kernel once
  return facts;
}

const char* isa_name(Isa isa) {
  constexpr const char* kNames[kIsas] = {"scalar", "avx2", "avx512", "avx512bf16", "amx"};
  return kNames[static_cast<int>(isa)];
}

std::string missing(Isa isa, const CpuFacts& facts) {
  std::string out;
  const auto require = [&out](const std::string& name, bool present) {
    if (!present) out += (out.empty() ? "" : ", ") + name;
  };
  const uint64_t state = facts.saved_state;
  if (isa >= Isa::kAvx2) {
    require("AVX2", bit(facts.leaf7_ebx, 5));
    require("FMA", bit(facts.leaf1_ecx, 12));
    require("F16C", bit(facts.leaf1_ecx, 29));
    require("AVX state saved by the operating system", has_all(state, 0x6));
  }
  if (isa >= Isa::kAvx512) {
    require("AVX512F", bit(facts.leaf7_ebx, 16));
    require("AVX512DQ", bit(facts.leaf7_ebx, 17));
    require("AVX512BW", bit(facts.leaf7_ebx, 30));
    require("AVX512VL", bit(facts.leaf7_ebx, 31));
    require("AVX-512 state saved by the operating system", has_all(state, 0xe6));
  }
  if (isa >= Isa::kAvx512Bf16) require("AVX512_BF16", bit(facts.leaf7_1_eax, 5));
  if (isa >= Isa::kAmx) {
    require("AMX-TILE", bit(facts.leaf7_edx, kAmxTile));
    require("AMX-BF16", bit(facts.leaf7_edx, kAmxBf16));
    require("tile state saved by the operating system", has_all(state, kTileState));
    require("the kernel's permission to use tile registers (ARCH_REQ_XCOMP_PERM: " +
                facts.tile_refusal + ")",
            facts.tile_refusal.empty());
  }
  return out;
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
  constexpr Isa kBest = Isa::kAvx512Bf16;  // amx only by name: nobody has timed it yet
  for (int i = static_cast<int>(kBest); i > 0; --i) {
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
