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

TEST_CASE("the best available tier is chosen, each one can be asked for") {
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
      best = asked.name;
      CHECK(why.find("HELM_CPU_ISA") != std::string::npos);
    } else {
      CHECK(cpu::kernels_of(s.isa) == nullptr);
      CHECK_THROWS_AS(cpu::select_kernels(), Error);
    }
  }
  const EnvironmentTier unset(nullptr);
  CHECK(std::string(cpu::select_kernels().name) == best);
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
