// The driver on a small model: what it hands to the scheduler of what its parts know.
#include "serve/driver.h"

#include <doctest/doctest.h>

#include <memory>

#include "tiny_model.h"

namespace {

using helm::Driver;
using helm::Engine;
using helm::Pacer;
using helm::test::token_ids;

std::unique_ptr<helm::Active> request_of(const Engine& engine, helm::RequestId id, int64_t prompt,
                                         int64_t max_tokens) {
  helm::Request request;
  request.prompt = token_ids(prompt, static_cast<int32_t>(id));
  request.max_tokens = max_tokens;
  return std::make_unique<helm::Active>(id, engine.plan(), std::move(request));
}

// Positions of a request that are computed.
int64_t computed(const Engine& engine, const Driver& driver, helm::RequestId id) {
  return engine.length(driver.table().find(id)->sequence);
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
