// Selection of integer products: order, environment variables, errors.
#include "cpu/integer_isa.h"

#include <doctest/doctest.h>
#include <stdlib.h>

#include <string>

namespace helm::test {
namespace {

// Sets a variable for one scope; null unsets it.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = getenv(name)) old_ = old, had_ = true;
    value ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Environment() { had_ ? setenv(name_, old_.c_str(), 1) : unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

std::string refusal() {
  try {
    cpu::select_integer_kernels();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInvalid);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the last integer products available are chosen, each can be asked for") {
  const Environment no_tier("HELM_CPU_ISA", nullptr);
  std::string best;
  for (const cpu::IntegerStatus& status : cpu::integer_report()) {
    CHECK(!status.reason.empty());
    const std::string name = cpu::integer_name(status.isa);
    const Environment asked("HELM_CPU_INT", name.c_str());
    if (status.available) {
      std::string why;
      CHECK(cpu::select_integer_kernels(&why).name == name);
      CHECK(why == name + ", asked for by HELM_CPU_INT");
      CHECK(cpu::integer_kernels_of(status.isa) != nullptr);
      best = name;
    } else {
      CHECK(cpu::integer_kernels_of(status.isa) == nullptr);
      CHECK(refusal().find("HELM_CPU_INT=" + name + ": " + status.reason) != std::string::npos);
    }
  }
  const Environment unset("HELM_CPU_INT", nullptr);
  std::string why;
  CHECK(cpu::select_integer_kernels(&why).name == best);
  CHECK(why.find(best + ", the best") == 0);
}

TEST_CASE("HELM_CPU_ISA bounds integer products") {
  const Environment tier("HELM_CPU_ISA", "scalar");
  {
    const Environment unset("HELM_CPU_INT", nullptr);
    CHECK(std::string(cpu::select_integer_kernels().name) == "scalar");
  }
  if (cpu::integer_kernels_of(cpu::IntegerIsa::kAvx2) == nullptr) return;
  const Environment asked("HELM_CPU_INT", "avx2");
  CHECK(refusal() ==
        "[cpu] HELM_CPU_INT=avx2: HELM_CPU_ISA=scalar excludes it; set it to one of scalar, or "
        "unset it for the best");
}

TEST_CASE("unknown integer products are refused with those that can be had") {
  const Environment no_tier("HELM_CPU_ISA", nullptr);
  const Environment asked("HELM_CPU_INT", "mmx");
  CHECK(refusal().find("HELM_CPU_INT=mmx: there are no such kernels; set it to one of scalar") !=
        std::string::npos);
}

TEST_CASE("integer products say what a machine lacks") {
  cpu::CpuFacts all;
  all.leaf1_ecx = 1u << 12 | 1u << 29;
  all.leaf7_ebx = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  all.leaf7_ecx = 1u << 11;
  all.leaf7_1_eax = 1u << 4;
  all.saved_state = 0xe6;
  using cpu::IntegerIsa;
  for (int i = 0; i < cpu::kIntegerIsas; ++i) {
    CHECK(cpu::missing(static_cast<IntegerIsa>(i), all) == "");
  }
  cpu::CpuFacts none = all;
  none.leaf7_ecx = none.leaf7_1_eax = 0;
  CHECK(cpu::missing(IntegerIsa::kAvx2, none) == "");
  CHECK(cpu::missing(IntegerIsa::kAvxVnni, none) == "AVX_VNNI");
  CHECK(cpu::missing(IntegerIsa::kAvx512Vnni, none) == "AVX512_VNNI");
  cpu::CpuFacts no_state = all;
  no_state.saved_state = 0x6;
  CHECK(cpu::missing(IntegerIsa::kAvxVnni, no_state) == "");
  CHECK(cpu::missing(IntegerIsa::kAvx512Vnni, no_state) ==
        "AVX-512 state saved by the operating system");
}

}  // namespace helm::test
