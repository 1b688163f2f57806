// Plans over two devices: every placement gives the tokens of the CPU, steps overlap, memory stays
// within the plan's budget.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::StepInput;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int64_t kLayers = 3;
constexpr int64_t kBlocks = 13;  // of 16 positions in a context of 200
constexpr int64_t kSequences = 4;

// units: one letter per unit, c or a.
TinyShape placed(const std::string& units) {
  TinyShape shape;
  shape.layers = kLayers;
  shape.sequences = kSequences;
  int64_t own = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    shape.devices.push_back(units[i] == 'a' ? "accelerator" : "cpu");
    own += units[i] == 'a' && i > 0 && i + 1 < units.size();
  }
  shape.pages = kLayers * kBlocks * kSequences;
  shape.accelerator_pages = own * kBlocks * kSequences;
  return shape;
}

std::vector<std::string> placements() {
  std::vector<std::string> all;
  for (int bits = 0; bits < 1 << (kLayers + 2); ++bits) {
    std::string units;
    for (int i = 0; i < kLayers + 2; ++i) units += (bits >> i & 1) != 0 ? 'a' : 'c';
    all.push_back(units);
  }
  return all;
}

std::vector<helm::Request> requests(int32_t count) {
  std::vector<helm::Request> all;
  for (int32_t i = 0; i < count; ++i) {
    helm::Request request;
    request.prompt = token_ids(std::max(70 - 9 * i, 1 + i), i);
    request.max_tokens = 6 + i;
    all.push_back(request);
  }
  return all;
}

std::vector<std::vector<int32_t>> generate(Engine& engine, int32_t count) {
  return helm::test::generated(engine, requests(count));
}

}  // namespace

TEST_CASE("every placement of every unit gives the tokens of the CPU") {
  const auto on_cpu = tiny_engine(tiny_model({.layers = kLayers, .sequences = kSequences}));
  const auto alone = generate(*on_cpu, 1);
  const auto batch = generate(*on_cpu, 7);
  for (const std::string& units : placements()) {
    CAPTURE(units);
    for (const bool overlap : {false, true}) {
      TinyShape shape = placed(units);
      shape.overlap = overlap;
      shape.decode_groups = overlap ? 2 : 1;
      const auto engine = tiny_engine(tiny_model(shape));
      CHECK(generate(*engine, 1) == alone);
      CHECK(generate(*engine, 7) == batch);
      CHECK(engine->in_flight() == 0);
      int64_t changes = 0;
      for (size_t i = 1; i < units.size(); ++i) changes += units[i] != units[i - 1];
      CHECK(engine->stats().crossings == changes);
    }
  }
}

TEST_CASE("more than eight sequences run at once") {
  TinyShape wide{.layers = kLayers, .sequences = 10};
  wide.pages = kLayers * kBlocks * 10;
  wide.step_tokens = 600;
  const auto expected = generate(*tiny_engine(tiny_model(wide)), 10);
  for (const int64_t groups : {1, 2}) {
    TinyShape shape = placed("ccaaa");
    shape.sequences = 10;
    shape.pages = wide.pages;
    shape.accelerator_pages = 2 * kBlocks * 10;
    shape.decode_groups = groups;
    shape.step_tokens = 600;  // all prompts in one step, then ten tokens in each
    const auto engine = tiny_engine(tiny_model(shape));
    {
      helm::Generation generation(*engine, requests(10));
      generation.advance(0);
      CHECK_FALSE(engine->can_open(1));  // all ten have their sequences
    }
    CHECK(engine->can_open(1));
    CHECK(generate(*engine, 10) == expected);
  }
}

TEST_CASE("blocks whose weights visit the accelerator give the tokens of the CPU") {
  const auto on_cpu = tiny_engine(tiny_model({.layers = kLayers, .sequences = kSequences}));
  const auto alone = generate(*on_cpu, 1);
  const auto batch = generate(*on_cpu, 7);
  for (const char* units : {"ccccc", "cccca", "ccaaa", "accca", "cacac", "cccac"}) {
    CAPTURE(units);
    // Tokens from which weights visit, and pages for them: some steps visit and others do not.
    // The first request has steps of 32, 32, 6 and five times 1 tokens, over 2, 4 and 5 pages.
    for (const auto& [tokens, pages, steps] :
         {std::tuple{1, 99, 8}, {9, 99, 2}, {32, 99, 2}, {2, 3, 1}, {1, 1, 0}}) {
      CAPTURE(tokens);
      CAPTURE(pages);
      TinyShape shape = placed(units);
      shape.visit_tokens = tokens;
      shape.visit_pages = pages;
      shape.overlap = tokens == 9;
      shape.decode_groups = tokens == 9 ? 2 : 1;
      const auto engine = tiny_engine(tiny_model(shape));
      CHECK(generate(*engine, 1) == alone);
      CHECK(engine->stats().streamed_steps == steps);
      CHECK(generate(*engine, 7) == batch);
      CHECK(engine->stats().devices.at(1).staging_bytes > 0);
    }
  }
}

TEST_CASE("a slow link changes nothing but the time") {
  const auto on_cpu = tiny_engine(tiny_model({.layers = kLayers, .sequences = kSequences}));
  TinyShape shape = placed("ccaac");
  shape.overlap = true;
  shape.decode_groups = 2;
  const auto engine = tiny_engine(tiny_model(shape), "sim:link=20MB/s,latency=200us,threads=2");
  CHECK(generate(*engine, 5) == generate(*on_cpu, 5));
}

TEST_CASE("steps may be on their way while sequences are cut and closed") {
  const auto on_cpu = tiny_engine(tiny_model({.layers = kLayers, .sequences = kSequences}));
  for (const char* units : {"ccaaa", "caaac", "acccc", "acaca"}) {
    CAPTURE(units);
    const auto engine = tiny_engine(tiny_model(placed(units)), "sim:latency=300us");
    const auto ids = token_ids(40, 1);
    const auto other = token_ids(20, 2);
    const auto expected = [&](const std::vector<int32_t>& tokens) {
      const auto sequence = on_cpu->open(100);
      std::vector<float> logits;
      on_cpu->forward(sequence, tokens, StepInput::Outputs::kLast,
                      [&](std::span<const float> row) { logits.assign(row.begin(), row.end()); });
      on_cpu->close(sequence);
      return logits;
    };
    const auto first = engine->open(100);
    const auto second = engine->open(100);
    const StepInput a{first, std::span(ids).first(32), StepInput::Outputs::kLast};
    const StepInput b{second, other, StepInput::Outputs::kLast};
    engine->submit({&a, 1});
    engine->submit({&b, 1});
    CHECK(engine->in_flight() == 2);
    CHECK_THROWS_AS(engine->submit({&b, 1}), helm::Error);
    CHECK_THROWS_AS(engine->step({&b, 1}), helm::Error);
    engine->truncate(first, 7);
    engine->close(second);
    const std::span<const float> got = engine->collect();
    const auto want = expected(std::vector<int32_t>(ids.begin(), ids.begin() + 32));
    CHECK(std::equal(got.begin(), got.end(), want.begin(), want.end()));
    const std::span<const float> next = engine->collect();
    const auto want_next = expected(other);
    CHECK(std::equal(next.begin(), next.end(), want_next.begin(), want_next.end()));
    CHECK_THROWS_AS(engine->collect(), helm::Error);
    // What remains of the first sequence is usable.
    const StepInput c{first, std::span(ids).subspan(7, 10), StepInput::Outputs::kLast};
    const std::span<const float> after = engine->step({&c, 1});
    const auto want_after = expected(std::vector<int32_t>(ids.begin(), ids.begin() + 17));
    CHECK(std::equal(after.begin(), after.end(), want_after.begin(), want_after.end()));
  }
}

TEST_CASE("who steps an engine beside a generation whose steps overlap is told to wait") {
  TinyShape shape = placed("ccaaa");
  shape.overlap = true;
  shape.decode_groups = 2;
  const auto engine = tiny_engine(tiny_model(shape));
  const auto expected = generate(*engine, 2);
  const helm::SequenceId sequence = engine->open(8);
  const std::vector<int32_t> ids = {1, 2};
  const StepInput input{sequence, ids, StepInput::Outputs::kLast};
  helm::Generation first(*engine, requests(2));
  helm::Generation second(*engine, requests(1));
  std::vector<std::vector<int32_t>> got(3);
  int refused = 0;
  while (!first.done()) {
    for (const helm::Token& t : first.advance(0)) {
      got[static_cast<size_t>(t.request)].push_back(t.id);
    }
    if (engine->in_flight() == 0) continue;
    ++refused;
    CHECK_THROWS_AS(second.advance(0), helm::Error);
    CHECK_THROWS_AS(engine->step({&input, 1}), helm::Error);
  }
  CHECK(refused > 0);
  while (!second.done()) {
    for (const helm::Token& t : second.advance(0)) {
      got[2 + static_cast<size_t>(t.request)].push_back(t.id);
    }
  }
  CHECK(engine->step({&input, 1}).size() > 0);
  CHECK(got == std::vector<std::vector<int32_t>>{expected[0], expected[1], expected[0]});
}

TEST_CASE("cancelling while steps are on their way frees the sequences") {
  TinyShape shape = placed("ccaac");
  shape.overlap = true;
  shape.decode_groups = 2;
  const auto engine = tiny_engine(tiny_model(shape), "sim:latency=100us");
  const auto expected = generate(*engine, 4);
  for (int steps = 0; steps < 8; ++steps) {
    helm::Generation generation(*engine, requests(4));
    for (int i = 0; i < steps; ++i) generation.advance(0);
    generation.cancel(1);
    for (const helm::Token& token : generation.advance(0)) CHECK(token.request != 1);
  }
  CHECK(generate(*engine, 4) == expected);
}

TEST_CASE("the accelerator's memory stays within the plan's budget, and is refused beyond it") {
  TinyShape shape = placed("ccaaa");
  const auto generous = tiny_engine(tiny_model(shape));
  const auto use = generous->stats().devices.at(1);
  CHECK(use.kind == "sim");
  CHECK(use.peak_bytes ==
        use.weights_bytes + use.kv_bytes + use.activations_bytes + use.workspace_bytes);
  shape.accelerator_bytes = use.peak_bytes;
  const auto exact = tiny_engine(tiny_model(shape));
  CHECK(generate(*exact, 2) == generate(*generous, 2));
  shape.accelerator_bytes = use.peak_bytes - 1;
  try {
    tiny_engine(tiny_model(shape));
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kMemory);
  }
}

TEST_CASE("so does the host's, for whatever lies there") {
  std::vector<TinyShape> shapes = {placed("ccccc"), placed("ccaaa"), placed("aaaaa"),
                                   placed("ccaac")};
  shapes.push_back(placed("cccaa"));
  shapes.back().visit_tokens = 9;
  shapes.back().visit_pages = 99;
  for (const char* site : {"stream", "cpu"}) {
    shapes.push_back(placed("ccaaa"));
    shapes.back().accelerator_pages = 2 * 12;
    shapes.back().overflow = site;
    shapes.back().weight_dtype = "f16";  // and buffers of loading
  }
  for (TinyShape& shape : shapes) {
    const auto generous = tiny_engine(tiny_model(shape));
    const auto use = generous->stats().devices.at(0);
    CHECK(use.budget_bytes == 0);
    CHECK(use.peak_bytes >= use.weights_bytes + use.kv_bytes + use.activations_bytes +
                                use.workspace_bytes + use.staging_bytes);
    shape.cpu_bytes = use.peak_bytes;
    const auto exact = tiny_engine(tiny_model(shape));
    CHECK(exact->stats().devices.at(0).budget_bytes == use.peak_bytes);
    CHECK(exact->stats().devices.at(0).peak_bytes == use.peak_bytes);
    CHECK(generate(*exact, 2) == generate(*generous, 2));
    for (const int64_t bytes : {int64_t{1}, use.peak_bytes / 3, use.peak_bytes - 1}) {
      shape.cpu_bytes = bytes;
      try {
        tiny_engine(tiny_model(shape));
        FAIL("no error was thrown");
      } catch (const helm::Error& error) {
        CHECK(error.kind() == helm::ErrorKind::kMemory);
        const std::string budget = "the plan's budget there is " + std::to_string(bytes);
        CHECK(std::string(error.what()).find(budget) != std::string::npos);
      }
    }
  }
}

TEST_CASE("a device that is smaller than the plan's budget is refused") {
  const auto model = tiny_model(placed("caaaa"));
  try {
    tiny_engine(model, "sim:vram=64KiB");
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kMemory);
  }
}

TEST_CASE("steps overlap exactly where the schedule says so") {
  const auto in_flight_after = [](bool overlap, int64_t groups, int steps) {
    TinyShape shape = placed("ccaaa");
    shape.overlap = overlap;
    shape.decode_groups = groups;
    const auto engine = tiny_engine(tiny_model(shape));
    helm::Generation generation(*engine, requests(4));
    for (int i = 0; i < steps; ++i) generation.advance(0);
    return engine->in_flight();
  };
  // Prompts of 70 and 61 tokens fill several steps of 32.
  CHECK(in_flight_after(false, 1, 1) == 0);
  CHECK(in_flight_after(true, 1, 1) == 1);
  // After 16 steps all four decode.
  CHECK(in_flight_after(false, 1, 10) == 0);
  CHECK(in_flight_after(true, 1, 10) == 0);
  CHECK(in_flight_after(true, 2, 14) == 1);
}
