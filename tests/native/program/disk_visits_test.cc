// Weights that visit an accelerator from disk: their programs, by hand, and engines whose long
// steps run so, beside those that have all in memory.
#include <doctest/doctest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan/disk.h"
#include "program/placed.h"

namespace {

using helm::DiskLayout;
using helm::Engine;
using helm::Plan;
using helm::test::placed_to_visit;
using helm::test::tiny_model;
using helm::test::TinyFolder;
using helm::test::TinyModel;
using helm::test::TinyShape;

// With the matrices of every so many-th layer on disk, and a ring for so many of the largest units.
TinyModel on_disk(const TinyFolder& folder, const TinyShape& shape, int64_t units,
                  int64_t every = 1) {
  const TinyModel model = tiny_model(shape);
  int64_t largest = 0;
  const Plan plan = Plan::from_json(folder.on_disk(model, 1 << 20, every).plan);
  for (const helm::DiskUnit& unit : disk_layout(plan).units) {
    largest = std::max(largest, unit.bytes);
  }
  return folder.on_disk(model, units * largest, every);
}

std::string program_of(const TinyShape& shape, int64_t units, int64_t every = 1) {
  const TinyFolder folder;
  return helm::programs(Plan::from_json(on_disk(folder, shape, units, every).plan)).at(1);
}

std::unique_ptr<Engine> engine_of(const TinyModel& model, const TinyFolder& folder,
                                  const std::string& device) {
  helm::EngineOptions options = model.options();
  options.directory = folder.path();
  options.device = device;
  return std::make_unique<Engine>(Plan::from_json(model.plan), options);
}

constexpr int64_t kSteps = 7, kLong = 4;

// Of two sequences in steps of many tokens and of few.
std::vector<float> logits_of(Engine& engine) {
  std::vector<float> all;
  const helm::SequenceId one = engine.open(45), other = engine.open(45);
  const std::vector<std::pair<int64_t, int64_t>> steps = {{20, 1}, {1, 1},   {7, 1}, {3, 20},
                                                          {1, 2},  {12, 12}, {1, 1}};
  int32_t seed = 3;
  for (const auto& [first, second] : steps) {
    const std::vector<int32_t> these = helm::test::token_ids(first, seed++),
                               those = helm::test::token_ids(second, seed++);
    const helm::StepInput inputs[] = {{one, these}, {other, those}};
    const auto logits = engine.step(inputs);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  engine.close(one);
  engine.close(other);
  return all;
}

std::string told(Engine& engine) {
  try {
    logits_of(engine);
  } catch (const helm::Error& error) {
    return error.what();
  }
  return "nothing";
}

}  // namespace

TEST_CASE("a layer on disk visits unit by unit: a place in the ring is left once it has gone up") {
  CHECK(program_of(placed_to_visit("ccac", 2), 4) == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 disk read layer.0.attention
3 up visit layer.0.attention aside after 2
4 disk read layer.0.mlp
5 up visit layer.0.mlp aside after 4
6 up page layer.0 cached
7 accelerator run layer.0.attention..layer.0.mlp after 1 5 6
8 down page layer.0 written after 7
9 accelerator run layer.1.attention..layer.1.mlp
10 down copy x_out accelerator>cpu after 9
11 cpu run head after 10)");
  CHECK(program_of(placed_to_visit("cccccc", 4), 1, 2) == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 disk read layer.0.attention
3 up visit layer.0.attention aside after 2
4 disk read layer.0.mlp after 3
5 up visit layer.0.mlp aside after 4
6 up page layer.0 cached
7 accelerator run layer.0.attention..layer.0.mlp after 1 5 6
8 up visit layer.1 aside
9 down page layer.0 written after 7
10 up page layer.1 cached
11 accelerator run layer.1.attention..layer.1.mlp after 8 10
12 disk read layer.2.attention after 5
13 up visit layer.2.attention aside after 7 12
14 disk read layer.2.mlp after 13
15 up visit layer.2.mlp aside after 7 14
16 down page layer.1 written after 11
17 up page layer.2 cached
18 accelerator run layer.2.attention..layer.2.mlp after 15 17
19 up visit layer.3 aside after 11
20 down page layer.2 written after 18
21 up page layer.3 cached
22 accelerator run layer.3.attention..layer.3.mlp after 19 21
23 down page layer.3 written after 22
24 down copy x_out accelerator>cpu after 22
25 cpu run head after 24)");
}

TEST_CASE("of a layer on two devices the CPU's unit visits from disk") {
  TinyShape shape = placed_to_visit("caccac", 2);  // attention there, then the mlp
  CHECK(program_of(shape, 2) == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 disk read layer.0.mlp
3 up visit layer.0.mlp aside after 2
4 up page layer.0 cached
5 accelerator run layer.0.attention..layer.0.mlp after 1 3 4
6 disk read layer.1.attention
7 up visit layer.1.attention aside after 6
8 down page layer.0 written after 5
9 up page layer.1 cached
10 accelerator run layer.1.attention..layer.1.mlp after 7 9
11 down page layer.1 written after 10
12 down copy x_out accelerator>cpu after 10
13 cpu run head after 12)");
}

TEST_CASE("long steps on the accelerator give the bits of the run in memory") {
  const std::vector<float> expected =
      logits_of(*helm::test::tiny_engine(tiny_model({.layers = 5})));
  for (const char* places : {"ccccccc", "cccccca", "cccccaa", "ccacacc", "caccccaaccac"}) {
    CAPTURE(places);
    TinyShape shape = placed_to_visit(places, 5);
    CHECK(logits_of(*helm::test::tiny_engine(tiny_model(shape))) == expected);
    for (const auto& [every, units, buffers, device] : {std::tuple{1, 1, 2, "sim:memory=10MB/s"},
                                                        {1, 2, 3, "sim:jitter=100us"},
                                                        {2, 1, 2, "sim:link=40MB/s"},
                                                        {2, 2, 2, "sim:latency=200us"},
                                                        {1, 40, 3, "sim:threads=2"}}) {
      CAPTURE(every);
      CAPTURE(units);
      shape.visit_buffers = buffers;
      const TinyFolder folder;
      const TinyModel model = on_disk(folder, shape, units, every);
      const auto engine = engine_of(model, folder, device);
      CHECK(logits_of(*engine) == expected);
      const helm::EngineStats stats = engine->stats();
      const DiskLayout layout = disk_layout(engine->plan());
      CHECK(stats.streamed_steps == kLong);
      CHECK(stats.disk_step_bytes == layout.step_bytes);
      CHECK(stats.disk_used_bytes == kSteps * layout.step_bytes);
      CHECK(stats.disk_read_bytes <=
            stats.disk_used_bytes + engine->plan().schedule.disk_ring_bytes);
      CHECK(stats.pageable_bytes == 0);
    }
  }
}

TEST_CASE("a file that shrinks or changes ends the step whose weights visit from there") {
  const TinyFolder folder;
  const TinyModel model = on_disk(folder, placed_to_visit("ccccccc", 5), 2);
  const auto engine = engine_of(model, folder, "sim");
  CHECK(told(*engine) == "nothing");
  const std::string path = folder.path() + "/weights";
  SUBCASE("it shrinks") {
    std::filesystem::resize_file(path, 20'000);
    for (int i = 0; i < 2; ++i) {
      const std::string said = told(*engine);
      CHECK_MESSAGE(said.find(path) != std::string::npos, said);
    }
  }
  SUBCASE("it is written to") {
    const auto time = std::filesystem::last_write_time(path);
    std::filesystem::last_write_time(path, time + std::chrono::seconds(3));
    CHECK(told(*engine).find("was written to") != std::string::npos);
  }
}

TEST_CASE("a device that is lost while weights come from disk ends what runs with an error") {
  int64_t lost = 0;
  for (int64_t command = 1;; command += 7) {
    REQUIRE(command < 5000);
    const TinyFolder folder;
    const TinyModel model = on_disk(folder, placed_to_visit("ccccaca", 5), 1);
    std::unique_ptr<Engine> engine;
    try {
      engine = engine_of(model, folder, "sim:lost=" + std::to_string(command));
    } catch (const helm::Error& error) {
      CHECK(error.kind() == helm::ErrorKind::kDevice);
      continue;
    }
    const std::string said = told(*engine);
    if (said == "nothing") break;
    ++lost;
    CHECK_MESSAGE(said.find("was lost at command") != std::string::npos, said);
    const std::string then = told(*engine);
    CHECK_MESSAGE(then.find("a device has failed") != std::string::npos, then);
  }
  CHECK(lost > 10);
}
