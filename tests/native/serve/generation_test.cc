// Generations that share an engine: whose failure is whose, and what they leave behind; which steps
// overlap.
#include <doctest/doctest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "helm/prefix_cache.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::Generation;
using helm::Request;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyModel;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int32_t kPoison = 7;  // whose logits are not finite

TinyModel poisoned(const TinyShape& shape) {
  TinyModel model = tiny_model(shape);
  helm::test::TinyTensor head = model.tensors.at("embed");
  head.data = std::make_shared<std::vector<float>>(*head.data);
  nlohmann::json plan = nlohmann::json::parse(model.plan);
  plan["tensors"].push_back(plan["tensors"][0]);
  plan["tensors"].back()["name"] = "head";
  plan["units"].back()["ops"].back()["parts"][0]["weight"] = "head";
  const nlohmann::json& device = plan["units"].back()["device"];
  nlohmann::json& slices = plan["slices"];
  size_t held = 0;
  while (slices[held]["tensor"] != "embed" || slices[held]["device"] != device) ++held;
  if (plan["units"][0]["device"] == device) {  // which reads both tensors
    slices.push_back(slices[held]);
    held = slices.size() - 1;
  }
  slices[held]["tensor"] = "head";
  model.plan = plan.dump();
  model.tensors.emplace("head", head);
  const auto width = static_cast<size_t>(shape.hidden);
  std::fill_n(model.tensors.at("embed").data->begin() + kPoison * shape.hidden, width,
              std::numeric_limits<float>::quiet_NaN());
  return model;
}

std::vector<int32_t> harmless(int64_t count) {
  std::vector<int32_t> ids = token_ids(count, 1);
  std::replace(ids.begin(), ids.end(), kPoison, kPoison + 1);
  return ids;
}

Request request_of(std::vector<int32_t> prompt, int64_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  return request;
}

Request failing(int64_t length) {
  Request request = request_of(harmless(length), 4);
  request.prompt.back() = kPoison;
  return request;
}

TinyShape overlapping() {
  TinyShape shape;
  shape.devices = {"accelerator", "accelerator", "accelerator", "cpu"};
  shape.accelerator_pages = shape.pages;
  shape.overlap = true;
  return shape;
}

int64_t drawn(Generation& generation) {
  int64_t count = 0;
  while (!generation.done()) count += std::ssize(generation.advance(0));
  return count;
}

}  // namespace

TEST_CASE("a request that fails in a step on its way fails alone") {
  const auto engine = tiny_engine(poisoned(overlapping()));
  Generation a(*engine, {failing(40)});  // two steps, of which advance() awaits the first
  Generation b(*engine, {request_of(harmless(10), 5)});
  CHECK(a.advance(0).empty());
  REQUIRE(engine->in_flight() == 1);
  a.rethrow(0);
  const std::vector<helm::Token> tokens = a.advance(0);
  REQUIRE(tokens.size() == 1);
  CHECK(tokens[0].finish == helm::Finish::kError);
  CHECK(tokens[0].id == -1);
  CHECK_THROWS_WITH_AS(a.rethrow(0), doctest::Contains("not finite"), helm::Error);
  CHECK(a.done());
  CHECK(drawn(b) == 5);
  b.rethrow(0);
}

TEST_CASE("the other requests of a batch get what they get without the one that fails") {
  const auto engine = tiny_engine(poisoned({}));
  const auto ids = [&](const std::vector<Request>& requests) {
    std::vector<std::vector<int32_t>> found(requests.size());
    Generation generation(*engine, requests);
    while (!generation.done()) {
      for (const helm::Token& token : generation.advance(0)) {
        if (token.finish != helm::Finish::kError) {
          found[static_cast<size_t>(token.request)].push_back(token.id);
        }
      }
    }
    return found;
  };
  const Request one = request_of(harmless(10), 5), other = request_of(harmless(12), 7);
  const auto alone = ids({one, other});
  REQUIRE(alone[0].size() == 5);
  REQUIRE(alone[1].size() == 7);
  const auto together = ids({one, failing(3), other, failing(11)});
  CHECK(together == std::vector<std::vector<int32_t>>{alone[0], {}, alone[1], {}});
}

TEST_CASE("prompts take all rows of a step that others leave") {
  const auto engine = tiny_engine(tiny_model());  // 32 rows
  Generation generation(*engine, {request_of(harmless(20), 30), request_of(harmless(100), 2)});
  std::vector<int64_t> steps;  // that give the second one a token
  for (int64_t step = 1; !generation.done(); ++step) {
    for (const helm::Token& token : generation.advance(0)) {
      if (token.request == 1) steps.push_back(step);
    }
  }
  CHECK(steps == std::vector<int64_t>{4, 5});  // after 12, 31, 31 and 26 rows
}

TEST_CASE("a request that finds no room ends alone") {
  TinyShape shape;
  shape.pages = 8;  // 64 positions of two layers
  const auto engine = tiny_engine(tiny_model(shape));
  for (const bool keeps : {false, true}) {
    CAPTURE(keeps);
    helm::PrefixCache prefixes(*engine);
    Generation generation(*engine, {request_of(harmless(100), 5), request_of(harmless(10), 5)},
                          keeps ? &prefixes : nullptr);
    CHECK(drawn(generation) == 1 + 5);
    CHECK_THROWS_AS(generation.rethrow(0), helm::Error);
    generation.rethrow(1);
    prefixes.clear();
  }
}

TEST_CASE("a device that is lost while steps overlap is told each time") {
  TinyShape shape = overlapping();
  shape.decode_groups = 2;
  const TinyModel model = tiny_model(shape);
  int64_t told = 0;
  for (int64_t command = 1; command < 120; ++command) {
    CAPTURE(command);
    std::unique_ptr<Engine> engine;
    try {
      engine = tiny_engine(model, "sim:lost=" + std::to_string(command));
    } catch (const helm::Error&) {
      continue;
    }
    Generation generation(*engine,
                          {request_of(token_ids(40, 1), 6), request_of(token_ids(40, 2), 6)});
    int64_t told_now = 0;
    for (int i = 0; i < 100 && !generation.done() && told_now < 2; ++i) {  // more than they need
      try {
        generation.advance(0);
      } catch (const helm::Error& error) {
        CHECK(error.kind() == helm::ErrorKind::kDevice);
        ++told_now;
      }
    }
    CHECK((generation.done() || told_now == 2));
    told += told_now;
  }
  CHECK(told > 20);
}

TEST_CASE("a request that ended in the step in which another failed gives its sequence back") {
  const auto engine = tiny_engine(poisoned({}));
  for (const bool keeps : {false, true}) {
    CAPTURE(keeps);
    helm::PrefixCache prefixes(*engine);
    for (int64_t round = 0; round < 2 * engine->plan().limits.sequences; ++round) {
      Generation generation(*engine, {request_of(harmless(3), 1), failing(3)},
                            keeps ? &prefixes : nullptr);
      CHECK(drawn(generation) == 2);
      CHECK_THROWS_AS(generation.rethrow(1), helm::Error);
    }
    prefixes.clear();
    std::vector<helm::SequenceId> all;
    for (int64_t i = 0; i < engine->plan().limits.sequences; ++i) all.push_back(engine->open(8));
    for (const helm::SequenceId id : all) engine->close(id);
  }
}

TEST_CASE("prompts and decoding groups overlap where the plan says so of each") {
  for (const bool prompts : {false, true}) {
    for (const int64_t groups : {1, 2}) {
      CAPTURE(prompts);
      CAPTURE(groups);
      TinyShape shape = overlapping();
      shape.overlap = prompts;
      shape.decode_groups = groups;
      const auto engine = tiny_engine(tiny_model(shape));
      Generation generation(*engine,
                            {request_of(token_ids(70, 1), 9), request_of(token_ids(70, 2), 9)});
      while (generation.advance(0).empty()) CHECK(engine->in_flight() == (prompts ? 1 : 0));
      for (int step = 0; step < 4; ++step) generation.advance(0);  // until both decode
      CHECK(engine->in_flight() == groups - 1);
      CHECK(drawn(generation) > 0);
    }
  }
}

TEST_CASE("a sequence that someone else closes ends its generation with an error, nothing more") {
  for (const bool keeps : {false, true}) {
    CAPTURE(keeps);
    const auto engine = tiny_engine(tiny_model());
    helm::PrefixCache prefixes(*engine);
    {
      Generation generation(*engine, {request_of(harmless(20), 9), request_of(harmless(30), 9)},
                            keeps ? &prefixes : nullptr);
      while (generation.advance(0).empty()) {
      }
      engine->close(0);
      CHECK_THROWS_WITH_AS(generation.advance(1), "[engine] sequence 0 is not open", helm::Error);
      CHECK_THROWS_AS(generation.cancel(0), helm::Error);
      generation.cancel(1);
      CHECK(generation.done());
    }
    {
      Generation generation(*engine, {request_of(harmless(20), 9)}, keeps ? &prefixes : nullptr);
      generation.advance(0);
      const helm::SequenceId next = engine->open(1);
      engine->close(next);
      engine->close(next - 1);  // the generation's
    }
    prefixes.clear();
    std::vector<helm::SequenceId> all;
    for (int64_t i = 0; i < engine->plan().limits.sequences; ++i) all.push_back(engine->open(8));
    for (const helm::SequenceId id : all) engine->close(id);
  }
}
