// Programs of every kind on a device whose commands begin late, each by another time: the tokens
// are those of a device that is never late.
#include <doctest/doctest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int64_t kLayers = 3;
constexpr int64_t kBlocks = 13;  // of one sequence

int schedules() {
  const char* wanted = std::getenv("HELM_TEST_SCHEDULES");
  return wanted != nullptr ? std::atoi(wanted) : helm::test::kFew ? 2 : 8;
}

struct Kind {
  const char* places;  // of the embedding, every layer and the head, or of every unit
  bool visits = false, overflows = false;
  const char* site = "stream";
  std::vector<std::string> visiting = {};  // tensors, in every step
};

const Kind kKinds[] = {
    {"ccaac"},
    {"acaca"},
    {"cacaccaa"},
    {"cccaa", true},
    {"ccccc", true},
    {"cacaccaa", true},
    {"ccaaa", false, true, "stream"},
    {"cacac", false, true, "cpu"},
    {"cacaccaa", false, true, "cpu"},
    {"cccaa", true, true, "stream"},
    {"ccaac", true, true, "cpu"},
    {"caaac", false, false, "stream", {"block."}},
    {"caaaa", false, false, "stream", {"gate", "block.1", "2.k"}},
    {"cacacaac", false, false, "stream", {"block."}},
};

TinyShape shape_of(const Kind& kind, int64_t visit_tokens, int64_t groups) {
  TinyShape shape;
  shape.layers = kLayers;
  shape.sequences = 3;
  const std::string places = kind.places;
  const bool by_layer = places.size() == kLayers + 2;
  int64_t there = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    shape.devices.push_back(places[i] == 'a' ? "accelerator" : "cpu");
    const bool attends = i > 0 && i + 1 < places.size() && (by_layer || i % 2 == 1);
    there += attends && places[i] == 'a';
  }
  shape.pages = kLayers * kBlocks * shape.sequences;
  shape.accelerator_pages = there * (kind.overflows ? 9 : kBlocks * shape.sequences);
  shape.overflow = kind.site;
  shape.visiting = kind.visiting;
  if (kind.visits) {
    shape.visit_tokens = visit_tokens;
    shape.visit_pages = 24;
  }
  shape.overlap = groups == 2;
  shape.decode_groups = groups;
  return shape;
}

std::vector<std::vector<int32_t>> generate(Engine& engine, uint32_t seed) {
  std::vector<helm::Request> requests(4);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    requests[i].prompt =
        token_ids(20 + (seed * 31 + 29 * n) % 100, static_cast<int32_t>(seed % 50 + i));
    requests[i].max_tokens = 5 + 3 * n;
  }
  return helm::test::generated(engine, requests);
}

}  // namespace

TEST_CASE("two steps at once, in programs of all kinds, however late commands begin") {
  int64_t visits = 0, attentions = 0, pages = 0;
  const auto on_cpu = tiny_engine(tiny_model({.layers = kLayers, .sequences = 3}));
  for (int i = 0; i < schedules(); ++i) {
    const auto seed = static_cast<uint32_t>(i);
    CAPTURE(seed);
    std::mt19937 random(seed);
    for (const Kind& kind : kKinds) {
      CAPTURE(std::string(kind.places));
      const int64_t visit_tokens = 1 + random() % 16;
      TinyShape shape = shape_of(kind, visit_tokens, 1 + random() % 2);
      shape.visit_buffers = 2 + random() % 3;
      const helm::test::TinyModel model = tiny_model(shape);
      const std::string jitter = std::to_string(20 + random() % 80);
      const auto punctual = tiny_engine(model);
      const auto late = tiny_engine(model, "sim:jitter=" + jitter + "us");
      const auto expected = generate(*punctual, seed);
      CHECK(generate(*late, seed) == expected);
      if (!kind.overflows) CHECK(generate(*on_cpu, seed) == expected);
      const helm::EngineStats stats = late->stats();
      CHECK((stats.evicted_blocks > 0) <= kind.overflows);
      visits += stats.streamed_steps;
      attentions += stats.cpu_attentions;
      pages += stats.page_visits;
    }
  }
  CHECK(visits > 0);
  CHECK(attentions > 0);
  CHECK(pages > 0);
}
