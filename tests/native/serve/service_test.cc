// An engine's own thread: whatever comes and goes, each request gets what it gets alone.
#include "helm/service.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::Event;
using helm::Finish;
using helm::Outbox;
using helm::Request;
using helm::RequestId;
using helm::Service;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

Request request_of(std::vector<int32_t> prompt, int64_t max_tokens, uint64_t seed = 0) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  if (seed > 0) request.sampling.temperature = 1;
  return request;
}

std::shared_ptr<Engine> shared_engine(const TinyShape& shape = {}, const char* device = "sim") {
  return tiny_engine(tiny_model(shape), device);
}

TinyShape overlapping() {
  TinyShape shape;
  shape.devices = {"accelerator", "accelerator", "accelerator", "cpu"};
  shape.accelerator_pages = shape.pages;
  shape.overlap = true;
  shape.decode_groups = 2;
  return shape;
}

// The tokens that have come for each request, and which have ended.
struct Received {
  std::map<RequestId, std::vector<int32_t>> tokens;
  std::map<RequestId, Finish> ended;

  void take(Outbox& outbox) {
    for (const Event& event : outbox.poll()) {
      const RequestId id = event.token.request;
      REQUIRE(ended.count(id) == 0);
      if (event.token.id >= 0) tokens[id].push_back(event.token.id);
      if (event.token.finish != Finish::kNone) ended[id] = event.token.finish;
    }
  }
  void all(Outbox& outbox) {
    REQUIRE(outbox.wait(60, true));
    take(outbox);
  }
};

std::vector<int32_t> alone(Engine& engine, const Request& request) {
  return helm::test::generated(engine, {request})[0];
}

std::string message_of(const std::exception_ptr& error) {
  REQUIRE(error != nullptr);
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& found) {
    return found.what();
  }
}

void use_up(Engine& engine) {
  std::vector<helm::SequenceId> all;
  for (int64_t i = 0; i < engine.plan().limits.sequences; ++i) all.push_back(engine.open(8));
  for (const helm::SequenceId id : all) engine.close(id);
}

// HELM_TEST_SCHEDULES asks for more of them, as under sanitizers by hand.
int schedules() {
  const char* asked = std::getenv("HELM_TEST_SCHEDULES");
  return asked != nullptr ? std::stoi(asked) : helm::test::kFew ? 10 : 50;
}

}  // namespace

TEST_CASE("requests that come and go at random get what each gets alone, bit by bit") {
  const auto reference = shared_engine();
  std::vector<Request> kinds;
  std::vector<std::vector<int32_t>> expected;
  for (int32_t i = 0; i < 12; ++i) {
    // Some begin alike, so that prefixes are found and waited for.
    std::vector<int32_t> prompt = token_ids(3 + 7 * i, i % 3);
    kinds.push_back(request_of(std::move(prompt), 1 + (5 * i) % 17, static_cast<uint64_t>(i)));
    expected.push_back(alone(*reference, kinds.back()));
  }
  for (const bool keeps : {false, true}) {
    for (const bool split : {false, true}) {
      CAPTURE(keeps);
      CAPTURE(split);
      const auto engine = shared_engine(split ? overlapping() : TinyShape{});
      Service service(engine, {keeps});
      std::mt19937 random(split ? 5 : 3);
      for (int schedule = 0; schedule < schedules(); ++schedule) {
        CAPTURE(schedule);
        const auto outbox = std::make_shared<Outbox>();
        std::map<RequestId, size_t> kind_of;
        std::vector<RequestId> cancelled;
        Received received;
        for (int action = 0; action < 16; ++action) {
          const uint32_t what = random() % 8;
          if (what < 5) {
            const size_t kind = random() % kinds.size();
            kind_of[service.submit(kinds[kind], outbox)] = kind;
          } else if (what == 5 && !kind_of.empty()) {
            auto it = kind_of.begin();
            std::advance(it, static_cast<int64_t>(random() % kind_of.size()));
            service.cancel(it->first);
            service.cancel(it->first);
            cancelled.push_back(it->first);
          } else if (what == 6) {
            received.take(*outbox);
          } else {
            outbox->wait(0.0002);
          }
        }
        received.all(*outbox);
        for (const auto& [id, kind] : kind_of) {
          const auto& want = expected[kind];
          const auto& got = received.tokens[id];
          if (std::find(cancelled.begin(), cancelled.end(), id) == cancelled.end()) {
            CHECK(got == want);
            CHECK(received.ended.count(id) == 1);
          } else {
            REQUIRE(got.size() <= want.size());
            CHECK(std::equal(got.begin(), got.end(), want.begin()));
          }
        }
      }
      const helm::ServiceStats stats = service.stats();
      CHECK(stats.running == 0);
      CHECK(stats.waiting == 0);
      CHECK(stats.kv_blocks_used == 0);
      CHECK(stats.tokens > 500);
      CHECK(service.failure() == nullptr);
      service.between_steps([](Engine& used, helm::PrefixCache* prefixes) {
        if (prefixes != nullptr) prefixes->clear();
        use_up(used);
      });
    }
  }
}

TEST_CASE("threads that submit at once share steps") {
  const auto engine = shared_engine();
  const Request request = request_of(token_ids(9, 1), 60);
  const auto expected = alone(*engine, request);
  Service service(engine, {false});
  const int64_t before = service.stats().steps;
  service.between_steps([&](Engine&, helm::PrefixCache*) {
    const auto outbox = std::make_shared<Outbox>();
    CHECK_THROWS_WITH_AS(service.submit(request, outbox), doctest::Contains("from a callback"),
                         helm::Error);
  });
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  service.between_steps([&](Engine&, helm::PrefixCache*) {  // all have submitted before a step
    std::atomic<int> submitted = 0;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        const auto outbox = std::make_shared<Outbox>();
        const RequestId id = service.submit(request, outbox);
        ++submitted;
        if (!outbox->wait(60, true)) return;
        std::vector<int32_t> tokens;
        for (const Event& event : outbox->poll()) {
          if (event.token.request == id) tokens.push_back(event.token.id);
        }
        right += tokens == expected;
      });
    }
    while (submitted < 4) std::this_thread::yield();
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 4);
  CHECK(service.stats().steps - before <= 64);  // not 4 x 60
}

TEST_CASE("an engine at rest waits for requests that follow at once") {
  Service service(shared_engine(), {false});
  const auto at_rest = [&] { service.between_steps([](Engine&, helm::PrefixCache*) {}); };
  at_rest();
  const auto outbox = std::make_shared<Outbox>();
  const int64_t before = service.stats().steps;
  for (int i = 0; i < 3; ++i) service.submit_all({request_of(token_ids(9, i), 6)}, outbox, true);
  CHECK_FALSE(outbox->wait(0.02));
  CHECK(service.stats().waiting == 3);
  service.begin();
  REQUIRE(outbox->wait(60, true));
  CHECK(outbox->poll().size() == 18);
  CHECK(service.stats().steps - before == 6);
  for (const bool stops : {false, true}) {  // neither needs begin()
    service.submit_all({request_of(token_ids(9, 1), 6)}, outbox, true);
    stops ? service.stop(60) : at_rest();
    REQUIRE(outbox->wait(60, true));
    CHECK(outbox->poll().back().token.finish == Finish::kLength);
  }
}

TEST_CASE("what a step fails with goes to every open request, and the service says so") {
  int64_t told = 0;
  const auto model = tiny_model(overlapping());
  for (int64_t command = 1; command < 60; ++command) {
    CAPTURE(command);
    std::shared_ptr<Engine> engine;
    try {
      engine = tiny_engine(model, "sim:lost=" + std::to_string(command));
    } catch (const helm::Error&) {
      continue;
    }
    Service service(engine);
    const auto outbox = std::make_shared<Outbox>();
    for (int i = 0; i < 6; ++i) service.submit(request_of(token_ids(40, i), 6), outbox);
    REQUIRE(outbox->wait(60, true));
    int64_t failed = 0, ended = 0;
    for (const Event& event : outbox->poll()) {
      ended += event.token.finish != Finish::kNone;
      if (event.token.finish != Finish::kError) continue;
      ++failed;
      CHECK(message_of(event.error) == message_of(service.failure()));
    }
    CHECK(ended == 6);
    told += failed > 0;
    if (failed == 0) continue;
    const auto again = std::make_shared<Outbox>();  // as the engine does, each later one fails too
    service.submit(request_of(token_ids(4, 1), 2), again);
    REQUIRE(again->wait(60, true));
    CHECK(again->poll().back().token.finish == Finish::kError);
  }
  CHECK(told > 10);
}

TEST_CASE("a request that finds no room fails alone, bad ones are refused") {
  TinyShape shape;
  shape.pages = 8;  // 64 positions of two layers
  Service service(shared_engine(shape));
  const auto outbox = std::make_shared<Outbox>();
  const RequestId large = service.submit(request_of(token_ids(100, 1), 5), outbox);
  const RequestId small = service.submit(request_of(token_ids(10, 1), 5), outbox);
  CHECK_THROWS_AS(service.submit(request_of({}, 5), outbox), helm::Error);
  CHECK_THROWS_AS(service.submit(request_of({999}, 5), outbox), helm::Error);
  CHECK_THROWS_AS(service.submit(request_of(token_ids(201, 1), 5), outbox), helm::Error);
  CHECK_THROWS_AS(service.submit(request_of(token_ids(3, 1), 0), outbox), helm::Error);
  CHECK_THROWS_AS(service.submit(request_of(token_ids(3, 1), 5), nullptr), helm::Error);
  Request continued = request_of(token_ids(3, 1), 5);
  continued.sequence = 0;
  CHECK_THROWS_AS(service.submit(continued, outbox), helm::Error);
  Received received;
  received.all(*outbox);
  CHECK(received.ended[large] == Finish::kError);
  CHECK(received.ended[small] == Finish::kLength);
  CHECK(received.tokens[small].size() == 5);
  CHECK(service.failure() == nullptr);
}

TEST_CASE("a cancelled request makes room within a step, and tells nobody") {
  TinyShape shape;
  shape.sequences = 1;
  Service service(shared_engine(shape), {false});
  const auto first = std::make_shared<Outbox>(), second = std::make_shared<Outbox>();
  const RequestId id = service.submit(request_of(token_ids(10, 1), 150), first);
  service.submit(request_of(token_ids(10, 2), 3), second);
  REQUIRE(first->wait(60));
  service.cancel(id);
  REQUIRE(second->wait(60, true));
  CHECK(second->poll().size() == 3);
  CHECK(first->wait(60, true));
  for (const Event& event : first->poll()) CHECK(event.token.finish == Finish::kNone);
  service.cancel(id);
  service.cancel(-1);
  service.cancel(12345);
}

TEST_CASE("an outbox's file descriptor is readable while there are events") {
  Service service(shared_engine());
  const auto outbox = std::make_shared<Outbox>();
  pollfd watched{outbox->event_fd(), POLLIN, 0};
  CHECK(::poll(&watched, 1, 0) == 0);
  service.submit(request_of(token_ids(10, 1), 4), outbox);
  REQUIRE(outbox->wait(60, true));
  CHECK(::poll(&watched, 1, 0) == 1);
  CHECK(outbox->poll().size() == 4);
  CHECK(::poll(&watched, 1, 0) == 0);
  const auto late = std::make_shared<Outbox>();
  service.submit(request_of(token_ids(10, 1), 1), late);
  REQUIRE(late->wait(60));
  pollfd other{late->event_fd(), POLLIN, 0};  // made when there is something already
  CHECK(::poll(&other, 1, 0) == 1);
}

TEST_CASE("work between steps has its turn while requests run, and they while it comes") {
  const auto engine = shared_engine();
  const Request request = request_of(token_ids(9, 1), 150);
  const auto expected = alone(*engine, request);
  Service service(engine);
  const auto outbox = std::make_shared<Outbox>();
  std::vector<std::thread> threads;
  std::atomic<bool> stop = false;
  std::atomic<int64_t> turns = 0;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        service.between_steps([&](Engine& used, helm::PrefixCache*) {
          CHECK(used.in_flight() == 0);
          ++turns;
        });
      }
    });
  }
  while (turns == 0) std::this_thread::yield();
  const int64_t before = turns;
  const RequestId id = service.submit(request, outbox);
  Received received;
  received.all(*outbox);
  CHECK(turns > before + 10);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(received.tokens[id] == expected);
  CHECK_THROWS_WITH_AS(
      service.between_steps([](Engine&, helm::PrefixCache*) { throw std::runtime_error("mine"); }),
      "mine", std::runtime_error);
  service.between_steps(
      [&](Engine&, helm::PrefixCache* prefixes) { CHECK(prefixes->kept() == 1); });
}

TEST_CASE("stopping ends what is open, after as long as is granted") {
  for (const double grace_s : {0.0, 30.0}) {
    CAPTURE(grace_s);
    Service service(shared_engine());
    const auto outbox = std::make_shared<Outbox>();
    const RequestId id = service.submit(request_of(token_ids(10, 1), 100), outbox);
    service.stop(grace_s);
    Received received;
    received.all(*outbox);
    CHECK(received.ended[id] == (grace_s > 0 ? Finish::kLength : Finish::kError));
    CHECK_THROWS_WITH_AS(service.submit(request_of({1}, 1), outbox), doctest::Contains("stopping"),
                         helm::Error);
    service.cancel(id);
    service.stop(0);
    bool ran = false;
    service.between_steps([&](Engine& engine, helm::PrefixCache* prefixes) {
      ran = prefixes == nullptr;
      use_up(engine);
    });
    CHECK(ran);
  }
  Service service(shared_engine());
  const auto outbox = std::make_shared<Outbox>();
  service.submit(request_of(token_ids(10, 1), 150), outbox);
  service.freeze();
  service.freeze();
  const int64_t steps = service.stats().steps;
  service.submit(request_of(token_ids(10, 1), 150), outbox);
  CHECK_FALSE(outbox->wait(0.02, true));
  CHECK(service.stats().steps == steps);
}
