// Tier selection: order, the environment variable, errors.
#include "cpu/isa.h"

#include <doctest/doctest.h>
#include <stdlib.h>

#include <string>

namespace helm::test {
namespace {

// Sets HELM_CPU_ISA for one scope.
class EnvironmentTier {
 public:
  explicit EnvironmentTier(const char* value) {
    if (const char* old = getenv("HELM_CPU_ISA")) old_ = old, had_ = true;
    value ? setenv("HELM_CPU_ISA", value, 1) : unsetenv("HELM_CPU_ISA");
  }
  ~EnvironmentTier() { had_ ? setenv("HELM_CPU_ISA", old_.c_str(), 1) : unsetenv("HELM_CPU_ISA"); }

 private:
  std::string old_;
  bool had_ = false;
};

}  // namespace

TEST_CASE("the best available tier up to avx512bf16 is chosen, each one can be asked for") {
  const auto report = cpu::isa_report();
  REQUIRE(report.size() == cpu::kIsas);
  CHECK(report[0].available);
  std::string best;
  for (const auto& s : report) {
    CHECK(!s.reason.empty());
    const EnvironmentTier set(cpu::isa_name(s.isa));
    if (s.available) {
      std::string why;
      const cpu::KernelTable& asked = cpu::select_kernels(&why);
      CHECK(std::string(asked.name) == cpu::isa_name(s.isa));
      if (s.isa <= cpu::Isa::kAvx512Bf16) best = asked.name;
      CHECK(why.find("HELM_CPU_ISA") != std::string::npos);
    } else {
      CHECK(cpu::kernels_of(s.isa) == nullptr);
      CHECK_THROWS_AS(cpu::select_kernels(), Error);
    }
  }
  const EnvironmentTier unset(nullptr);
  CHECK(std::string(cpu::select_kernels().name) == best);
}

TEST_CASE("a tier that lacks something says what") {
  cpu::CpuFacts all;
  all.leaf1_ecx = 1u << 12 | 1u << 29;
  all.leaf7_ebx = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  all.leaf7_edx = 1u << 22 | 1u << 24;
  all.leaf7_1_eax = 1u << 5;
  all.saved_state = 0x600e6;
  struct Lack {
    std::string name;
    cpu::Isa first;  // that needs it
    void (*take)(cpu::CpuFacts*);
  };
  using cpu::CpuFacts, cpu::Isa;
  const Lack lacks[] = {
      {"AVX2", Isa::kAvx2, [](CpuFacts* f) { f->leaf7_ebx ^= 1u << 5; }},
      {"FMA", Isa::kAvx2, [](CpuFacts* f) { f->leaf1_ecx ^= 1u << 12; }},
      {"F16C", Isa::kAvx2, [](CpuFacts* f) { f->leaf1_ecx ^= 1u << 29; }},
      {"AVX512F", Isa::kAvx512, [](CpuFacts* f) { f->leaf7_ebx ^= 1u << 16; }},
      {"AVX512DQ", Isa::kAvx512, [](CpuFacts* f) { f->leaf7_ebx ^= 1u << 17; }},
      {"AVX512BW", Isa::kAvx512, [](CpuFacts* f) { f->leaf7_ebx ^= 1u << 30; }},
      {"AVX512VL", Isa::kAvx512, [](CpuFacts* f) { f->leaf7_ebx ^= 1u << 31; }},
      {"AVX-512 state saved by the operating system", Isa::kAvx512,
       [](CpuFacts* f) { f->saved_state ^= 0x40; }},
      {"AVX512_BF16", Isa::kAvx512Bf16, [](CpuFacts* f) { f->leaf7_1_eax = 0; }},
      {"AMX-TILE", Isa::kAmx, [](CpuFacts* f) { f->leaf7_edx ^= 1u << 24; }},
      {"AMX-BF16", Isa::kAmx, [](CpuFacts* f) { f->leaf7_edx ^= 1u << 22; }},
      {"tile state saved by the operating system", Isa::kAmx,
       [](CpuFacts* f) { f->saved_state ^= 0x40000; }},
      {"the kernel's permission to use tile registers (ARCH_REQ_XCOMP_PERM: Operation not "
       "permitted)",
       Isa::kAmx, [](CpuFacts* f) { f->tile_refusal = "Operation not permitted"; }},
  };
  for (int i = 0; i < cpu::kIsas; ++i) {
    const Isa isa = static_cast<Isa>(i);
    CHECK(cpu::missing(isa, all) == "");
    for (const Lack& lack : lacks) {
      CpuFacts facts = all;
      lack.take(&facts);
      CHECK(cpu::missing(isa, facts) == (isa < lack.first ? "" : lack.name));
    }
  }
  all.leaf7_edx = 0;
  all.saved_state = 0xe6;
  CHECK(cpu::missing(Isa::kAmx, all) ==
        "AMX-TILE, AMX-BF16, tile state saved by the operating system");
}

TEST_CASE("an unknown tier is refused with what was found and what is allowed") {
  const EnvironmentTier set("sse9");
  try {
    cpu::select_kernels();
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::kInvalid);
    CHECK(std::string(e.what()).find("sse9") != std::string::npos);
    CHECK(std::string(e.what()).find("scalar") != std::string::npos);
  }
}

}  // namespace helm::test
