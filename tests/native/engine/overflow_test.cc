// KV pages that do not fit on the accelerator: the same tokens for every size of its pool, site of
// attention, watermark, page size and placement; blocks that come back; refusals. Linked once per
// kind of accelerator: helm::test::kAccelerator.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "helm/generation.h"
#include "support/check.h"
#include "support/this_build.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::StepInput;
using helm::test::kNewTokens;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

std::unique_ptr<Engine> engine_of(const helm::test::TinyModel& model) {
  return helm::test::tiny_engine(model, helm::test::kAccelerator);
}

constexpr int64_t kLayers = 3;
constexpr int64_t kContext = 200;
const bool kReadsI8 = std::string_view(helm::test::kAccelerator).starts_with("sim");

struct Overflow {
  std::string units = "ccaaa";
  int64_t page_tokens = 16;
  int64_t slots = 8;  // blocks of all sequences that the accelerator holds
  std::string site = "stream";
  double watermark = 0.8;
  int64_t sequences = 2;
  std::string kv_dtype = "f32";
  int64_t context = kContext;
  int64_t step_tokens = 32;
};

TinyShape shape_of(const Overflow& o) {
  TinyShape shape;
  shape.layers = kLayers;
  shape.context = o.context;
  shape.sequences = o.sequences;
  shape.step_tokens = o.step_tokens;
  shape.page_tokens = o.page_tokens;
  shape.kv_dtype = o.kv_dtype;
  const int64_t blocks = (o.context + o.page_tokens - 1) / o.page_tokens * o.sequences;
  int64_t own = 0;
  for (size_t i = 0; i < o.units.size(); ++i) {
    shape.devices.push_back(o.units[i] == 'a' ? "accelerator" : "cpu");
    own += o.units[i] == 'a' && i > 0 && i + 1 < o.units.size();
  }
  shape.pages = kLayers * blocks;
  shape.accelerator_pages = own * std::min(o.slots, blocks);
  shape.overflow = o.site;
  shape.watermark = o.watermark;
  return shape;
}

std::vector<std::vector<int32_t>> generate(Engine& engine, const std::vector<int64_t>& lengths,
                                           int64_t tokens) {
  std::vector<helm::Request> requests;
  for (size_t i = 0; i < lengths.size(); ++i) {
    helm::Request request;
    request.prompt = token_ids(lengths[i], static_cast<int32_t>(i));
    request.max_tokens = tokens;
    requests.push_back(request);
  }
  return helm::test::generated(engine, requests);
}

const std::vector<int64_t> kLengths = {150, 20, 101, 67};

}  // namespace

TEST_CASE("greedy tokens do not depend on where KV pages lie") {
  const auto on_cpu = engine_of(tiny_model({.layers = kLayers, .context = kContext}));
  const auto expected = generate(*on_cpu, kLengths, kNewTokens);
  for (const char* site : {"stream", "cpu"}) {
    CAPTURE(site);
    const std::string name = site;
    for (const Overflow& o : helm::test::sampled<Overflow>({
             {.site = name},
             {.slots = 6, .site = name, .watermark = 0},
             {.slots = 9, .site = name, .watermark = 1},
             {.units = "aaaaa", .slots = 7, .site = name},
             {.units = "cacac", .slots = 7, .site = name},
             {.units = "acaca", .slots = 7, .site = name},
             {.units = "caaac", .page_tokens = 5, .slots = 15, .site = name},
             {.units = "caaac", .page_tokens = 1, .slots = 60, .site = name},
             {.units = "ccaaa", .page_tokens = 64, .slots = 5, .site = name, .watermark = 0.5},
         })) {
      CAPTURE(o.units);
      CAPTURE(o.page_tokens);
      CAPTURE(o.slots);
      const auto engine = engine_of(tiny_model(shape_of(o)));
      CHECK(generate(*engine, kLengths, kNewTokens) == expected);
      const helm::EngineStats stats = engine->stats();
      CHECK(stats.evicted_blocks > 0);
      CHECK(stats.page_visits > 0);  // prefill, whatever decode does
      CHECK((stats.cpu_attentions > 0) == (name == "cpu"));
    }
  }
}

TEST_CASE("nor with integers in the cache" * doctest::skip(!kReadsI8)) {
  const auto on_cpu =
      tiny_engine(tiny_model({.layers = kLayers, .context = kContext, .kv_dtype = "i8"}));
  const auto expected = generate(*on_cpu, kLengths, 40);
  for (const char* site : {"stream", "cpu"}) {
    for (const int64_t page_tokens : {1, 5, 16}) {
      CAPTURE(site);
      CAPTURE(page_tokens);
      TinyShape shape = shape_of({.units = "cacac",
                                  .page_tokens = page_tokens,
                                  .slots = 16 * 7 / page_tokens,
                                  .site = site,
                                  .kv_dtype = "i8"});
      const auto engine = tiny_engine(tiny_model(shape));
      CHECK(generate(*engine, kLengths, 40) == expected);
      CHECK(engine->stats().evicted_blocks > 0);
    }
  }
}

TEST_CASE("contexts of more than sixteen times what the accelerator holds") {
  constexpr int64_t kLong = 900, kHeld = 3 * 16;
  static_assert(kLong > 16 * kHeld);
  const auto on_cpu = tiny_engine(tiny_model({.layers = kLayers, .context = kLong}));
  const std::vector<int64_t> lengths = {kLong - kNewTokens};
  const auto expected = generate(*on_cpu, lengths, kNewTokens);
  for (const char* site : {"stream", "cpu"}) {
    CAPTURE(site);
    const TinyShape shape =
        shape_of({.slots = 3, .site = site, .sequences = 1, .context = kLong, .step_tokens = 16});
    const auto engine = engine_of(tiny_model(shape));
    CHECK(generate(*engine, lengths, kNewTokens) == expected);
    CHECK(engine->stats().evicted_blocks > 50);
  }
}

TEST_CASE("with overlapping steps as well") {
  const auto on_cpu = engine_of(tiny_model({.layers = kLayers, .context = kContext}));
  const auto expected = generate(*on_cpu, kLengths, kNewTokens);
  for (const char* site : {"stream", "cpu"}) {
    for (const char* units : {"ccaaa", "cacac", "aaaac"}) {
      CAPTURE(site);
      CAPTURE(units);
      TinyShape shape = shape_of({.units = units, .site = site});
      shape.overlap = true;
      shape.decode_groups = 2;
      CHECK(generate(*engine_of(tiny_model(shape)), kLengths, kNewTokens) == expected);
      shape.visit_tokens = 8;
      shape.visit_pages = 20;
      CHECK(generate(*engine_of(tiny_model(shape)), kLengths, kNewTokens) == expected);
    }
  }
}

TEST_CASE("a window looks past what has left") {
  for (const int64_t window : {9, 40, 111}) {
    CAPTURE(window);
    const auto on_cpu =
        engine_of(tiny_model({.layers = kLayers, .context = kContext, .window = window}));
    const auto expected = generate(*on_cpu, kLengths, kNewTokens);
    for (const char* site : {"stream", "cpu"}) {
      TinyShape shape = shape_of({.slots = 6, .site = site});
      shape.window = window;
      CHECK(generate(*engine_of(tiny_model(shape)), kLengths, kNewTokens) == expected);
    }
  }
}

TEST_CASE("a sequence that is cut back into an evicted block goes on") {
  const auto on_cpu = engine_of(tiny_model({.layers = kLayers, .context = kContext}));
  const auto engine = engine_of(tiny_model(shape_of({.slots = 6, .watermark = 0})));
  const auto first = token_ids(140, 1);
  const auto tail = token_ids(50, 5);
  for (const int64_t keep : {139, 128, 100, 90, 64, 17, 16, 15, 1}) {
    CAPTURE(keep);
    std::vector<std::vector<float>> rows;
    for (Engine* e : {on_cpu.get(), engine.get()}) {
      std::vector<float> logits;
      const auto consume = [&](std::span<const float> row) {
        logits.assign(row.begin(), row.end());
      };
      const auto sequence = e->open(kContext);
      e->forward(sequence, first, StepInput::Outputs::kLast, consume);
      e->truncate(sequence, keep);
      e->forward(sequence, tail, StepInput::Outputs::kLast, consume);
      e->close(sequence);
      rows.push_back(logits);
    }
    for (size_t i = 0; i < rows[0].size(); ++i) {
      // The same sums grouped otherwise: a few roundings.
      CHECK(std::abs(rows[0][i] - rows[1][i]) <= 1e-4F * (1 + std::abs(rows[0][i])));
    }
  }
}

TEST_CASE("what is full on every tier refuses the newcomer, and the others go on") {
  const auto on_cpu = engine_of(tiny_model({.layers = kLayers, .context = kContext}));
  TinyShape shape = shape_of({.slots = 8, .sequences = 3});
  shape.pages = kLayers * 20;  // of 13 blocks each
  const auto engine = engine_of(tiny_model(shape));
  const auto sequence = engine->open(kContext);
  CHECK_THROWS_AS(engine->open(kContext), helm::Error);
  const auto other = engine->open(7 * 16);  // all that is left
  const std::vector<std::pair<helm::SequenceId, std::vector<int32_t>>> both = {
      {sequence, token_ids(kContext, 3)}, {other, token_ids(7 * 16, 4)}};
  for (const auto& [id, ids] : both) {
    engine->forward(id, std::span(ids).first(ids.size() - 1), StepInput::Outputs::kNone, {});
  }
  for (const auto& [id, ids] : both) {  // every block is in use by now
    std::vector<float> got, want;
    engine->forward(id, std::span(ids).last(1), StepInput::Outputs::kLast,
                    [&](std::span<const float> row) { got.assign(row.begin(), row.end()); });
    const auto reference = on_cpu->open(kContext);
    on_cpu->forward(reference, ids, StepInput::Outputs::kLast,
                    [&](std::span<const float> row) { want.assign(row.begin(), row.end()); });
    on_cpu->close(reference);
    REQUIRE(got.size() == want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      CHECK(std::abs(got[i] - want[i]) <= 1e-4F * (1 + std::abs(want[i])));
    }
  }
  engine->close(sequence);
  CHECK(engine->can_open(kContext));
  engine->close(other);
}

TEST_CASE("where every block of both memories is in use, an evicted one changes places") {
  const auto on_cpu = engine_of(tiny_model({.layers = kLayers, .context = kContext}));
  for (const char* site : {"stream", "cpu"}) {
    CAPTURE(std::string(site));
    TinyShape shape = shape_of({.slots = 9, .site = site, .sequences = 4, .step_tokens = 16});
    shape.pages = kLayers * 16;
    const auto engine = engine_of(tiny_model(shape));
    std::vector<helm::SequenceId> kept, reference;
    for (int32_t i = 0; i < 4; ++i) {
      const auto prompt = token_ids(60, i);
      kept.push_back(engine->open(60));
      engine->forward(kept.back(), prompt, StepInput::Outputs::kNone, {});
      engine->resize(kept.back(), 60, 60);
      reference.push_back(on_cpu->open(64));
      on_cpu->forward(reference.back(), prompt, StepInput::Outputs::kNone, {});
    }
    for (const helm::SequenceId id : kept) engine->resize(id, 60, 64);
    const auto next = token_ids(4, 9);
    const auto same = [&](const std::vector<size_t>& chosen, size_t position) {
      std::vector<StepInput> inputs, wanted;
      const auto token = std::span(next).subspan(position, 1);
      for (const size_t i : chosen) inputs.push_back({kept[i], token, StepInput::Outputs::kLast});
      for (const size_t i : chosen) {
        wanted.push_back({reference[i], token, StepInput::Outputs::kLast});
      }
      const auto got = engine->step(inputs);
      const auto want = on_cpu->step(wanted);
      REQUIRE(got.size() == want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        CHECK(std::abs(got[i] - want[i]) <= 1e-4F * (1 + std::abs(want[i])));
      }
    };
    same({0}, 0);
    same({1, 2, 3}, 0);
    same({3, 0, 2, 1}, 1);
    for (const helm::SequenceId id : kept) engine->close(id);
    for (const helm::SequenceId id : reference) on_cpu->close(id);
    CHECK(engine->can_open(kContext));
  }
}

TEST_CASE("a pool too small for one step is refused when the plan is loaded") {
  try {
    engine_of(tiny_model(shape_of({.slots = 3})));
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kInvalid);
    CHECK(std::string(error.what()).find("schedule.pages.accelerator") != std::string::npos);
  }
}

TEST_CASE("memory on the accelerator stays what it was while the context grows") {
  const auto engine = engine_of(tiny_model(shape_of({.slots = 6})));
  const int64_t before = engine->stats().devices.at(1).peak_bytes;
  generate(*engine, kLengths, kNewTokens);
  CHECK(engine->stats().devices.at(1).peak_bytes == before);
  CHECK(engine->stats().devices.at(1).peak_bytes < (int64_t{1} << 30));
}
