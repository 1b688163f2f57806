// What NEO (Jiang et al., MLSys 2025) publishes of throughput, on the virtual clock. docs/papers.md
// sets derived and published figures side by side and says where the rates come from.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "serve/virtual_server.h"

namespace {

using helm::ModeSet;
using helm::StepMode;
using helm::test::VirtualMachine;
using helm::test::VirtualRequest;
using helm::test::VirtualResult;

constexpr double kGb = 1e9;

ModeSet modes(std::initializer_list<StepMode> list) {
  ModeSet set;
  for (const StepMode mode : list) set.set(static_cast<size_t>(mode));
  return set;
}
const ModeSet kNear = modes({StepMode::kNear});
const ModeSet kNeo = modes({StepMode::kNear, StepMode::kSplit});
const ModeSet kAll = modes({StepMode::kNear, StepMode::kJoint, StepMode::kSplit});

// LLaMa-3.1-8B on an A10G, with a share of the server's memory and its bandwidth.
VirtualMachine a10g(const char* name, double cpu_gb_per_s, int64_t far_tokens) {
  return {name,     32,     436e6,  218e6, 4096,  500 * kGb,  60e12, 36e12, cpu_gb_per_s * kGb,
          20 * kGb, 0.2e-3, 1.05e9, 4096,  26400, far_tokens, 20480, 512};
}
// LLaMa-2-7B on a T4.
VirtualMachine t4() {
  return {"T4",     32,     405e6,  202.4e6, 16384, 250 * kGb, 25e12, 15e12, 60 * kGb,
          10 * kGb, 0.2e-3, 0.26e9, 4096,    864,   38000,     832,   512};
}
// LLaMa-3.1-70B on two H100s, as one device with the rates of both.
VirtualMachine h100() {
  return {"2 H100", 80,      1711e6, 855e6, 4096,  5200 * kGb, 1000e12, 600e12, 120 * kGb,
          80 * kGb, 0.15e-3, 2.1e9,  8192,  30000, 366000,     20480,   768};
}

std::vector<VirtualRequest> requests(int64_t count, double prompt, double output) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> about(0.9, 1.1);
  std::vector<VirtualRequest> list;
  for (int64_t i = 0; i < count; ++i) {
    list.push_back({static_cast<int64_t>(prompt * about(random)),
                    std::max<int64_t>(2, static_cast<int64_t>(output * about(random)))});
  }
  return list;
}

// Times SwiftLLM's throughput, by output length.
struct Gains {
  std::vector<double> near, neo, all;
  double peak() const { return *std::max_element(neo.begin(), neo.end()); }
  double peak_output = 0;
};

Gains gains_of(const VirtualMachine& machine, double prompt, const std::vector<double>& outputs,
               int64_t count) {
  Gains gains;
  for (const double output : outputs) {
    const std::vector<VirtualRequest> list = requests(count, prompt, output);
    const double base_s = helm::test::unmixed_s(machine, list);
    const VirtualResult near = helm::test::serve(machine, list, kNear);
    const VirtualResult neo = helm::test::serve(machine, list, kNeo);
    const VirtualResult all = helm::test::serve(machine, list, kAll);
    gains.near.push_back(base_s / near.seconds);
    if (gains.neo.empty() || base_s / neo.seconds > gains.peak()) gains.peak_output = output;
    gains.neo.push_back(base_s / neo.seconds);
    gains.all.push_back(base_s / all.seconds);
    CHECK(near.modes[1] + near.modes[2] == 0);
    CHECK(neo.modes[1] == 0);
    MESSAGE(machine.name, " ", prompt, "/", output, ": near ", base_s / near.seconds, ", split ",
            base_s / neo.seconds, ", and joint ", base_s / all.seconds, "; far ", neo.most_far,
            " and ", all.most_far);
  }
  return gains;
}

// Whatever the lengths, far requests cost nothing, and a further mode neither.
void check_never_below(const Gains& gains) {
  for (size_t i = 0; i < gains.near.size(); ++i) {
    CAPTURE(i);
    CHECK(gains.neo[i] >= 0.95 * gains.near[i]);
    CHECK(gains.all[i] >= std::max(gains.near[i], gains.neo[i]));
  }
}

bool within_a_quarter(double found, double published) {
  return found >= 0.75 * published && found <= 1.25 * published;
}

}  // namespace

TEST_CASE("NEO's gains on four instances with an A10G, ordered by the CPU's bandwidth") {
  const std::vector<double> outputs = {50, 100, 200, 300, 400};
  std::vector<Gains> gains;
  // tests of figure 10a; a server's memory is shared out by cores
  const std::vector<std::pair<VirtualMachine, double>> instances = {
      {a10g("g5.2xlarge", 50, 115000), 1.122},
      {a10g("g5.4xlarge", 50, 230000), 1.133},
      {a10g("g5.8xlarge", 95, 460000), 1.297},
      {a10g("g5.16xlarge", 180, 920000), 1.793}};
  for (const auto& [machine, published] : instances) {
    CAPTURE(machine.name);
    gains.push_back(gains_of(machine, 1000, outputs, 300));
    CHECK(within_a_quarter(gains.back().peak(), published));
    check_never_below(gains.back());
  }
  // The first two have the same bandwidth.
  CHECK(std::max(gains[0].peak(), gains[1].peak()) < gains[2].peak());
  CHECK(gains[2].peak() < gains[3].peak());
  // More bandwidth carries longer answers.
  CHECK(gains[1].peak_output < gains[2].peak_output);
  CHECK(gains[2].peak_output <= gains[3].peak_output);
}

TEST_CASE("NEO's gain on a T4, whose memory holds two requests") {
  const Gains gains = gains_of(t4(), 200, {10, 50, 100, 200}, 900);
  CHECK(within_a_quarter(gains.peak(), 7.5));
  check_never_below(gains);
  const Gains summaries = gains_of(t4(), 372, {45}, 300);
  CHECK(within_a_quarter(summaries.peak(), 6.63));
  check_never_below(summaries);
}

TEST_CASE("on two H100s NEO gains little, and all requests far lose") {
  const Gains gains = gains_of(h100(), 2000, {50, 100, 200, 400}, 400);
  check_never_below(gains);
  const std::vector<VirtualRequest> list = requests(200, 2000, 400);
  const double base_s = helm::test::unmixed_s(h100(), list);
  const double far_s = helm::test::serve(h100(), list, kNeo, true).seconds;
  MESSAGE("FastDecode's rule 2000/400: ", base_s / far_s);
  CHECK(base_s / far_s < 0.6);
}
