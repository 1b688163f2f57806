// The driver on a small model: what it hands to the scheduler of what its parts know.
#include "serve/driver.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "tiny_model.h"

namespace {

using helm::Driver;
using helm::Engine;
using helm::Pacer;
using helm::test::token_ids;

std::unique_ptr<helm::Active> request_of(const Engine& engine, helm::RequestId id, int64_t prompt,
                                         int64_t max_tokens, bool streamed = true) {
  helm::Request request;
  request.prompt = token_ids(prompt, static_cast<int32_t>(id));
  request.max_tokens = max_tokens;
  request.streamed = streamed;
  return std::make_unique<helm::Active>(id, engine.plan(), std::move(request));
}

// Positions of a request that are computed.
int64_t computed(const Engine& engine, const Driver& driver, helm::RequestId id) {
  return engine.length(driver.table().find(id)->sequence);
}

// The accelerator holds some two requests. far_position_steps: see TinyShape.
std::unique_ptr<Engine> engine_with_sides(double far_position_steps) {
  helm::test::TinyShape shape;
  shape.devices = {"cpu", "accelerator", "accelerator", "accelerator"};
  shape.threads = 1;
  shape.page_tokens = 8;
  shape.context = 96;
  shape.step_tokens = 16;
  shape.pages = 2 * 40;
  shape.accelerator_pages = 2 * 12;
  shape.overflow = "cpu";
  shape.watermark = 1;
  shape.far_position_steps = far_position_steps;
  return helm::test::tiny_engine(helm::test::tiny_model(shape));
}

}  // namespace

TEST_CASE("a prompt beside decoding rows has as many rows as the pacer gives it") {
  helm::test::TinyShape shape;
  shape.step_tokens = 128;
  const auto engine = helm::test::tiny_engine(helm::test::tiny_model(shape));
  for (const double target_s : {1e-9, 1e6}) {
    CAPTURE(target_s);
    Driver driver(*engine, nullptr);
    driver.pace(target_s);
    driver.add(request_of(*engine, 0, 40, 50));
    REQUIRE(driver.step());
    CHECK(computed(*engine, driver, 0) == 40);  // alone, as many as a step holds
    driver.add(request_of(*engine, 1, 100, 2));
    REQUIRE(driver.step());
    CHECK(computed(*engine, driver, 0) == 41);
    CHECK(computed(*engine, driver, 1) == (target_s < 1 ? Pacer::kLeastRows : 100));
  }
}

TEST_CASE("prompts are paced beside requests that are streamed alone") {
  helm::test::TinyShape shape;
  shape.step_tokens = 128;
  const auto engine = helm::test::tiny_engine(helm::test::tiny_model(shape));
  Driver driver(*engine, nullptr);
  driver.pace(1e-9);
  driver.add(request_of(*engine, 0, 40, 50, false));
  REQUIRE(driver.step());
  driver.add(request_of(*engine, 1, 60, 2));
  REQUIRE(driver.step());
  CHECK(computed(*engine, driver, 1) == 60);  // its own tokens are awaited, none of another
  driver.add(request_of(*engine, 2, 60, 2, false));
  REQUIRE(driver.step());
  CHECK(computed(*engine, driver, 2) == Pacer::kLeastRows);
  REQUIRE(driver.step());  // after which the streamed one has ended
  CHECK(computed(*engine, driver, 2) == 60);
}

TEST_CASE("a far row waits where it does not pay, but no longer than its bound") {
  using helm::ModeChooser;
  for (const bool pays : {true, false}) {
    CAPTURE(pays);
    const auto engine = engine_with_sides(pays ? 1e-9 : 10);
    Driver driver(*engine, nullptr, {}, {8});
    std::map<helm::RequestId, int64_t> idle;  // steps since its last token
    for (helm::RequestId id = 0; id < 4; ++id) driver.add(request_of(*engine, id, 9, 60));
    int64_t most = 0, far_steps = 0;
    while (!driver.ended()) {
      std::vector<helm::RequestId> decoding;
      for (const helm::Active* active : driver.table().running()) {
        if (active->decoding()) decoding.push_back(active->id);
        far_steps += engine->side(active->sequence) == helm::KvSide::kFar;
      }
      REQUIRE(driver.step());
      for (const helm::RequestId id : decoding) ++idle[id];
      for (const helm::Token& token : driver.take_tokens()) idle[token.request] = 0;
      for (const auto& [id, steps] : idle) most = std::max(most, steps);
    }
    CHECK(far_steps > 20);
    const helm::ModeUses& uses = driver.mode_uses();
    CHECK(uses[0].steps + uses[1].steps + uses[2].steps == driver.steps());
    CHECK(uses[1].steps == engine->far_use().joint_steps);
    CHECK(uses[2].steps == engine->far_use().split_steps);
    CHECK(uses[0].predicted_s > 0);
    CHECK(uses[1].measured_s > 0);
    if (pays) {
      CHECK(most == 0);
    } else {
      // Of three others at most one is due before it.
      CHECK(most >= 1);
      CHECK(most <= ModeChooser::kMostSkips + 3);
    }
  }
}

TEST_CASE("tokens that were passed over shorten the prompts of their step") {
  const auto passed_over = [](const helm::Active* active) { return active->skips > 0; };
  for (const bool waits : {true, false}) {
    CAPTURE(waits);
    const auto engine = engine_with_sides(10);
    Driver driver(*engine, nullptr, {}, {8});
    driver.pace(1e-9);
    for (helm::RequestId id = 0; id < 3; ++id) driver.add(request_of(*engine, id, 22, 60));
    for (int step = 0; std::ranges::none_of(driver.table().running(), passed_over); ++step) {
      REQUIRE(step < 100);
      REQUIRE(driver.step());
    }
    const int64_t before = computed(*engine, driver, 2);  // the last one, still a prompt
    REQUIRE(before + Pacer::kLeastRows < 22);
    driver.pace(0.5);  // far more than a step takes
    if (waits) std::this_thread::sleep_for(std::chrono::milliseconds(550));
    REQUIRE(driver.step());
    const int64_t rows = computed(*engine, driver, 2) - before;
    CHECK((rows == Pacer::kLeastRows) == waits);
  }
}

TEST_CASE("a request that would be far begins only where that pays") {
  for (const bool pays : {true, false}) {
    CAPTURE(pays);
    const auto engine = engine_with_sides(pays ? 1e-9 : 10);
    Driver driver(*engine, nullptr, {}, {8});
    for (helm::RequestId id = 0; id < 4; ++id) driver.add(request_of(*engine, id, 30, 10));
    REQUIRE(driver.step());
    CHECK(driver.table().running().size() == (pays ? 4 : 2));
    if (!pays) CHECK(engine->can_open(8));
    while (!driver.ended()) REQUIRE(driver.step());
    CHECK((driver.moves_far() > 0) == pays);
  }
}

TEST_CASE("a priority out of range is refused") {
  const auto engine = helm::test::tiny_engine(helm::test::tiny_model());
  for (const int32_t priority : {-1, 3, 1 << 30}) {
    helm::Request request;
    request.prompt = token_ids(3, 0);
    request.priority = priority;
    CHECK_THROWS_WITH_AS(helm::check_request(engine->plan(), request, "[generate] "),
                         doctest::Contains("priority must be 0 (batch), 1 (normal) or 2"),
                         helm::Error);
  }
}
