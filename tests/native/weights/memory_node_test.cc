// Weights that a plan puts on memory nodes: whole pages there before anybody touches them, the same
// results, and an error where the system refuses.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/memory_node.h"
#include "helm/machine.h"
#include "support/this_build.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::EngineOptions;
using helm::Plan;
using helm::test::logits_of;
using helm::test::TinyModel;
using helm::test::token_ids;
using json = nlohmann::json;

constexpr int kEven = 3, kOdd = 7;

// Matrices are converted, so that they are copied; every other one to another node.
TinyModel model_on(int even, int odd) {
  helm::test::TinyShape shape;
  shape.weight_dtype = "f16";
  TinyModel model = helm::test::tiny_model(shape);
  json plan = json::parse(model.plan);
  std::map<std::string, size_t> dims;
  for (const json& tensor : plan["tensors"]) dims[tensor["name"]] = tensor["shape"].size();
  int seen = 0;
  for (json& slice : plan["slices"]) {
    if (dims[slice["tensor"]] == 2) slice["node"] = ++seen % 2 == 0 ? even : odd;
  }
  model.plan = plan.dump();
  return model;
}

struct Call {
  uintptr_t begin;
  int64_t bytes;
  int node;
};

std::map<int, int64_t> planned_bytes(const Plan& plan) {
  std::map<int, int64_t> bytes;
  for (const helm::SliceSpec& slice : plan.slices) {
    if (slice.node != helm::kAnyNode) bytes[slice.node] += plan.own_bytes(slice);
  }
  return bytes;
}

}  // namespace

TEST_CASE("weights lie on the nodes that the plan names, byte for byte, and steps are the same") {
  helm::test::TinyShape shape;
  shape.weight_dtype = "f16";
  const TinyModel plain = helm::test::tiny_model(shape);
  Engine alone(Plan::from_json(plain.plan), plain.options());
  CHECK(alone.stats().node_bytes.empty());

  const TinyModel model = model_on(kEven, kOdd);
  EngineOptions options = model.options();
  std::vector<Call> calls;
  options.bind_memory = [&](void* memory, int64_t bytes, int node) {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    unsigned char present = 1;  // nobody has touched it
    CHECK(mincore(memory, 1, &present) == 0);
    CHECK((present & 1) == 0);
    calls.push_back({begin, bytes, node});
    return 0;
  };
  const Plan plan = Plan::from_json(model.plan);
  Engine engine(plan, options);
  REQUIRE(calls.size() == 2);
  const std::map<int, int64_t> planned = planned_bytes(plan);
  for (const Call& call : calls) {
    CHECK(call.begin % static_cast<uintptr_t>(getpagesize()) == 0);
    CHECK(call.bytes % getpagesize() == 0);
    CHECK(call.bytes >= planned.at(call.node));
  }
  CHECK(calls[0].node == kEven);
  CHECK(calls[1].node == kOdd);
  CHECK(engine.stats().node_bytes == planned);
  CHECK(engine.stats().weights_bytes == alone.stats().weights_bytes);
  CHECK(logits_of(engine, token_ids(20, 3)) == logits_of(alone, token_ids(20, 3)));
}

TEST_CASE("paced steps read each byte at the rate of where it lies") {
  const TinyModel model = model_on(kEven, kOdd);
  EngineOptions options = model.options();
  options.bind_memory = [](void*, int64_t, int) { return 0; };
  options.pace = {4e6, 1e6};
  const Plan plan = Plan::from_json(model.plan);
  Engine engine(plan, options);
  int64_t there = 0, rows = 0;
  for (const auto& [node, bytes] : planned_bytes(plan)) there += bytes;
  const helm::SliceSpec& embedding = *plan.slice(0, helm::kCpu);  // of which a step reads rows
  REQUIRE(plan.tensors[0].rows() == 61);
  if (embedding.node != helm::kAnyNode) rows = plan.bytes(embedding);
  const double least = static_cast<double>(there - rows) / options.pace.node_bytes_per_s;
  double best = 1e9;
  const helm::SequenceId sequence = engine.open(20);
  for (int32_t token = 0; token < 8; ++token) {
    const auto start = std::chrono::steady_clock::now();
    engine.forward(sequence, std::span(&token, 1), helm::StepInput::Outputs::kLast,
                   [](std::span<const float>) {});
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    CHECK(spent.count() >= least);
    best = std::min(best, spent.count());
  }
  CHECK((helm::test::kSanitized || best < 1.5 * least));
}

TEST_CASE("a node that the system refuses is named, and nothing stays behind") {
  const TinyModel model = model_on(kEven, kOdd);
  EngineOptions options = model.options();
  options.bind_memory = [](void*, int64_t, int node) { return node == kOdd ? EPERM : 0; };
  try {
    const Engine engine(Plan::from_json(model.plan), options);
    FAIL("it was loaded");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kMemory);
    const std::string text = error.what();
    CHECK(text.find("memory node 7 (Operation not permitted)") != std::string::npos);
  }
}

TEST_CASE("the system's own call binds memory to a node") {
  CHECK(helm::bind_memory(nullptr, 4096, -1) == EINVAL);
  CHECK(helm::bind_memory(nullptr, 4096, helm::kMostNodes) == EINVAL);
  CHECK(!helm::memory_node_refusal(helm::kMostNodes - 1).empty());
  const std::string refusal = helm::memory_node_refusal(0);
  if (!refusal.empty()) {
    MESSAGE("not tried: ", refusal);
    return;
  }
  const helm::Arena arena(int64_t{4} << 20, "a test");
  REQUIRE(helm::bind_memory(arena.data(), arena.bytes(), 0) == 0);
  std::ifstream maps("/proc/self/numa_maps");
  const auto begin = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(arena.data()));
  std::string line, found;
  while (std::getline(maps, line)) {
    if (std::stoull(line, nullptr, 16) == begin) found = line;
  }
  if (maps.eof() && !found.empty()) CHECK(found.find("bind:0") != std::string::npos);
  const TinyModel model = model_on(0, 0);
  Engine engine(Plan::from_json(model.plan), model.options());
  CHECK(logits_of(engine, token_ids(20, 3)).size() == 61);
}

TEST_CASE("nodes of a plan are checked") {
  const json good = json::parse(model_on(kEven, kOdd).plan);
  const auto message = [](const json& plan) -> std::string {
    try {
      Plan::from_json(plan.dump());
    } catch (const helm::Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message(good).empty());
  for (const json& bad : {json(-1), json(helm::kMostNodes), json("0"), json(nullptr)}) {
    json plan = good;
    plan["slices"][0]["node"] = bad;
    CHECK(message(plan).find("slices[0].node") != std::string::npos);
  }
  json plan = good;
  for (json& slice : plan["slices"]) {
    if (slice.contains("node")) slice["access"] = "mapped";
  }
  CHECK(message(plan).find("only what is copied to the CPU's memory lies on a node") !=
        std::string::npos);
}
