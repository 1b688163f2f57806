// What goes wrong while KV pages move: late copies, refused memory, a lost device, sequences closed
// with copies on their way; and a fork. Tokens stay right or an error says what happened; run under
// the sanitizers, nothing leaks, races or hangs.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "helm/generation.h"
#include "helm/prefix_cache.h"
#include "support/this_build.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::StepInput;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int64_t kContext = 200;
constexpr int64_t kBlocks = 13;  // of one sequence

// Two sequences of which the accelerator, with two of three layers, holds a quarter.
TinyShape overflowing(const std::string& site, double watermark = 0) {
  TinyShape shape;
  shape.layers = 3;
  shape.context = kContext;
  shape.sequences = 2;
  shape.step_tokens = 32;
  shape.devices = {"cpu", "cpu", "accelerator", "accelerator", "accelerator"};
  shape.pages = 3 * kBlocks * 2;
  shape.accelerator_pages = 2 * 6;
  shape.overflow = site;
  shape.watermark = watermark;
  return shape;
}

std::vector<std::vector<int32_t>> generate(Engine& engine) {
  std::vector<helm::Request> requests(3);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = token_ids(150 - static_cast<int64_t>(i) * 40, static_cast<int32_t>(i));
    requests[i].max_tokens = 30;
  }
  return helm::test::generated(engine, requests);
}

std::vector<std::vector<int32_t>> expected() {
  return generate(*tiny_engine(tiny_model({.layers = 3, .context = kContext})));
}

}  // namespace

TEST_CASE("late copies and late kernels change no token") {
  const auto tokens = expected();
  for (const char* site : {"stream", "cpu"}) {
    for (const char* device : {"sim:jitter=100us", "sim:link=200MB/s", "sim:latency=200us"}) {
      CAPTURE(site);
      CAPTURE(device);
      CHECK(generate(*tiny_engine(tiny_model(overflowing(site)), device)) == tokens);
      TinyShape shape = overflowing(site, 0.8);
      shape.overlap = true;
      shape.decode_groups = 2;
      CHECK(generate(*tiny_engine(tiny_model(shape), device)) == tokens);
    }
  }
}

TEST_CASE("every allocation may be refused") {
  const auto tokens = expected();
  for (const char* site : {"stream", "cpu"}) {
    const helm::test::TinyModel model = tiny_model(overflowing(site));
    int64_t refused = 0;
    for (;; ++refused) {
      REQUIRE(refused < 1000);
      try {
        const auto engine = tiny_engine(model, "sim:refuse=" + std::to_string(refused + 1));
        CHECK(generate(*engine) == tokens);  // there is no such allocation
        break;
      } catch (const helm::Error& error) {
        CHECK(error.kind() == helm::ErrorKind::kMemory);
        CHECK(std::string(error.what()).find("is refused") != std::string::npos);
      }
    }
    CHECK(refused > 10);
  }
}

TEST_CASE("a device that is lost ends what runs with an error") {
  const int64_t kPart = helm::test::kFew ? 2 : 5;
  for (const char* site : {"stream", "cpu"}) {
    const helm::test::TinyModel model = tiny_model(overflowing(site));
    int64_t lost_while_running = 0;
    for (int64_t command = 1; command < 6000; command += 1 + command / kPart) {
      CAPTURE(site);
      CAPTURE(command);
      std::unique_ptr<Engine> engine;
      try {
        engine = tiny_engine(model, "sim:lost=" + std::to_string(command));
      } catch (const helm::Error& error) {
        CHECK(error.kind() == helm::ErrorKind::kDevice);
        continue;
      }
      try {
        generate(*engine);
      } catch (const helm::Error& error) {
        CHECK(error.kind() == helm::ErrorKind::kDevice);
        ++lost_while_running;
        CHECK_THROWS_AS(generate(*engine), helm::Error);  // and not with other tokens
      }
    }
    CHECK(lost_while_running > (helm::test::kFew ? 4 : 10));
  }
}

TEST_CASE("a sequence may be closed while its pages are copied") {
  const auto on_cpu = tiny_engine(tiny_model({.layers = 3, .context = kContext}));
  for (const char* site : {"stream", "cpu"}) {
    CAPTURE(site);
    TinyShape shape = overflowing(site);
    shape.overlap = true;
    const auto engine = tiny_engine(tiny_model(shape), "sim:latency=300us,jitter=100us");
    const auto ids = token_ids(128, 1);
    const auto others = token_ids(150, 7);
    std::vector<float> want;
    const auto reference = on_cpu->open(kContext);
    on_cpu->forward(reference, others, StepInput::Outputs::kLast,
                    [&](std::span<const float> row) { want.assign(row.begin(), row.end()); });
    on_cpu->close(reference);
    for (size_t steps = 1; steps <= 4; ++steps) {
      const auto doomed = engine->open(kContext);
      for (size_t i = 0; i < steps; ++i) {
        if (engine->in_flight() == engine->steps_ahead()) engine->collect();
        const StepInput input{doomed, std::span(ids).subspan(32 * i, 32),
                              StepInput::Outputs::kNone};
        engine->submit({&input, 1});
      }
      engine->close(doomed);  // evicted blocks are still leaving
      while (engine->in_flight() > 0) engine->collect();
      std::vector<float> got;
      const auto sequence = engine->open(kContext);  // in the pages that became free
      engine->forward(sequence, others, StepInput::Outputs::kLast,
                      [&](std::span<const float> row) { got.assign(row.begin(), row.end()); });
      engine->close(sequence);
      REQUIRE(got.size() == want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        CHECK(std::abs(got[i] - want[i]) <= 1e-4F * (1 + std::abs(want[i])));
      }
    }
    CHECK(engine->stats().evicted_blocks > 0);
  }
}

namespace {

bool refuses(const std::function<void()>& call) {
  try {
    call();
  } catch (const helm::Error& error) {
    const bool says = std::string(error.what()).find("is a forked child") != std::string::npos;
    return says && error.kind() == helm::ErrorKind::kInvalid;
  }
  return false;
}

}  // namespace

TEST_CASE("a forked child is refused at once, and ends") {
  auto engine = tiny_engine(tiny_model(overflowing("cpu")));
  auto prefixes = std::make_unique<helm::PrefixCache>(*engine);
  helm::Request request;
  request.prompt = token_ids(100, 1);
  request.max_tokens = 30;
  const std::vector<helm::Request> requests{request, request};
  auto generation = std::make_unique<helm::Generation>(*engine, requests, prefixes.get());
  generation->advance(0);
  auto pool = std::make_unique<helm::ThreadPool>(3);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends a child that hangs
    bool right = engine->forked();
    right = right && refuses([&] { engine->open(10); });
    right = right && refuses([&] { engine->stats(); });
    right = right && refuses([&] { generation->advance(0); });
    right = right && refuses([&] { helm::Generation(*engine, requests, prefixes.get()); });
    right = right && refuses([&] { prefixes->open(request.prompt, 120); });
    right = right && refuses([&] { pool->run([](helm::Team&) {}); });
    generation.reset();
    prefixes.reset();
    engine.reset();
    pool.reset();
    _exit(right ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  while (!generation->done()) generation->advance(1);
}
