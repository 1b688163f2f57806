// Requests that grow block by block in a memory that does not hold them all: each gets the tokens
// that it gets alone, bit by bit, however often it is parked; what finds no room says so.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "serve/driver.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Driver;
using helm::Engine;
using helm::Finish;
using helm::PrefixCache;
using helm::Request;
using helm::RequestId;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int64_t kBlocks = 14;

TinyShape shape_of(int64_t blocks = kBlocks) {
  TinyShape shape;
  shape.page_tokens = 8;
  shape.context = 96;
  shape.threads = 1;
  shape.pages = shape.layers * blocks;
  return shape;
}

TinyShape on_accelerator(int64_t groups) {
  TinyShape shape = shape_of();
  shape.devices = {"accelerator", "accelerator", "cpu", "cpu"};
  shape.accelerator_pages = kBlocks;  // of one layer
  shape.overlap = groups > 1;
  shape.decode_groups = groups;
  return shape;
}

// The accelerator holds some two of the requests; others may go to host memory.
TinyShape on_both_sides(int64_t groups, double watermark) {
  TinyShape shape = on_accelerator(groups);
  shape.devices = {"cpu", "accelerator", "accelerator", "accelerator"};
  shape.step_tokens = 16;
  shape.pages = 2 * 28;
  shape.accelerator_pages = 2 * 12;
  shape.overflow = "cpu";
  shape.watermark = watermark;
  return shape;
}

// The same with tables, by which far rows wait or do not.
TinyShape with_modes(int64_t groups, double far_position_steps) {
  TinyShape shape = on_both_sides(groups, 1);
  shape.far_position_steps = far_position_steps;
  return shape;
}

TinyShape windowed() {
  TinyShape shape = shape_of();
  shape.step_tokens = 8;
  shape.window = 9;
  shape.window_blocks = shape.sequences * ((9 + 8 - 3 + 8) / 8 + 1);
  return shape;
}

Request request_of(int32_t kind) {
  Request request;
  // Some begin alike, so that prefixes are found and waited for.
  request.prompt = token_ids(3 + 5 * (kind % 9), kind % 3);
  request.max_tokens = 5 + 11 * kind % 45;
  request.sampling.temperature = kind % 2 == 0 ? 0.0F : 1.0F;
  request.sampling.seed = static_cast<uint64_t>(kind);
  request.sampling.repetition_penalty = kind % 5 == 0 ? 1.2F : 1.0F;
  request.sampling.frequency_penalty = kind % 4 == 0 ? 0.5F : 0.0F;
  return request;
}

struct Received {
  std::map<RequestId, std::vector<int32_t>> tokens;
  std::map<RequestId, Finish> ended;

  void take(Driver& driver) {
    for (const helm::Token& token : driver.take_tokens()) {
      REQUIRE(ended.count(token.request) == 0);
      if (token.id >= 0) tokens[token.request].push_back(token.id);
      if (token.finish != Finish::kNone) ended[token.request] = token.finish;
    }
  }
};

struct Moves {
  int64_t parked = 0, far = 0, near = 0;
  int64_t waited = 0;  // steps in which some far row was left out
  int64_t split = 0;   // steps in two sub-batches
};

// Now and then the modes of the next steps are others than those that pay.
void force_mode(helm::ModeChooser& modes, uint32_t what) {
  using helm::StepMode;
  if (what % 5 != 0) return;
  constexpr std::array<std::optional<StepMode>, 4> kForced = {std::nullopt, StepMode::kNear,
                                                              StepMode::kJoint, StepMode::kSplit};
  modes.force(kForced[what % kForced.size()]);
}

// To where it is not, if there is room.
void move(Engine& engine, const helm::Active& active) {
  using helm::KvSide;
  if (!engine.moves() || !active.decoding()) return;
  const bool near = engine.near_blocks(active.sequence) > 0;
  const auto side = near ? KvSide::kFar : KvSide::kNear;
  if (engine.can_move(active.sequence, side)) engine.move(active.sequence, side);
}

// Runs a schedule of its own of arrivals, cancels and moves to its end.
Moves run(Engine& engine, PrefixCache* prefixes, uint32_t seed,
          const std::vector<std::vector<int32_t>>& expected) {
  std::mt19937 random(seed);
  Driver driver(engine, prefixes, {}, {8});
  std::map<RequestId, int32_t> kind_of;
  std::vector<RequestId> cancelled;
  Received received;
  RequestId next = 0;
  int64_t waited = 0;
  for (int64_t action = 0; next < 8 || !driver.ended(); ++action) {
    REQUIRE(action < 5000);
    const uint32_t what = random() % 8;
    if (next < 8 && (what < 3 || driver.ended())) {
      const auto kind = static_cast<int32_t>(random() % expected.size());
      Request request = request_of(kind);
      request.priority = static_cast<int32_t>(random() % 3);
      request.key = static_cast<int64_t>(random() % 2);
      kind_of[next] = kind;
      driver.add(std::make_unique<helm::Active>(next++, engine.plan(), std::move(request)));
    } else if (random() % 100 == 0 && next > 0) {
      cancelled.push_back(static_cast<RequestId>(random() % static_cast<uint64_t>(next)));
      received.take(driver);
      driver.cancel(cancelled.back());
    } else if (const auto& running = driver.table().running();
               !running.empty() && random() % 10 == 0) {
      move(engine, *running[random() % running.size()]);
    } else if (!driver.ended()) {
      if (driver.modes() != nullptr) force_mode(*driver.modes(), random());
      REQUIRE(driver.step());
      waited += std::ranges::any_of(driver.table().running(), &helm::Active::skips);
      received.take(driver);
    }
  }
  received.take(driver);
  CHECK(driver.reserved_blocks() == 0);
  CHECK(driver.waiting_parked() == 0);
  for (const auto& [id, kind] : kind_of) {
    CAPTURE(id);
    const std::vector<int32_t>& want = expected[static_cast<size_t>(kind)];
    const std::vector<int32_t>& got = received.tokens[id];
    if (received.ended.count(id) == 1) {
      CHECK(received.ended[id] == Finish::kLength);
      CHECK(got == want);
    } else {
      REQUIRE(std::find(cancelled.begin(), cancelled.end(), id) != cancelled.end());
      REQUIRE(got.size() <= want.size());
      CHECK(std::equal(got.begin(), got.end(), want.begin()));
    }
  }
  return {driver.preemptions(), driver.moves_far(), driver.moves_near(), waited,
          driver.mode_uses()[static_cast<size_t>(helm::StepMode::kSplit)].steps};
}

void check_all_free(Engine& engine, int64_t blocks) {
  std::vector<helm::SequenceId> all;
  for (int64_t left = blocks; left > 0; left -= 12) {
    all.push_back(engine.open(8 * std::min<int64_t>(left, 12)));
  }
  CHECK(!engine.can_open(1));
  for (const helm::SequenceId id : all) engine.close(id);
}

void add(Driver& driver, const Engine& engine, RequestId id, Request request) {
  driver.add(std::make_unique<helm::Active>(id, engine.plan(), std::move(request)));
}

}  // namespace

TEST_CASE("requests that are parked at random get what each gets alone, bit by bit") {
  for (const auto& [name, shape] : {std::pair<std::string, TinyShape>{"cpu", shape_of()},
                                    {"windows", windowed()},
                                    {"two devices", on_accelerator(1)},
                                    {"two groups", on_accelerator(2)},
                                    {"two sides", on_both_sides(1, 1)},
                                    {"two sides and groups", on_both_sides(2, 0.9)},
                                    {"modes, far rows pay", with_modes(1, 1e-6)},
                                    {"modes and groups", with_modes(2, 0.1)}}) {
    CAPTURE(name);
    TinyShape ample = shape_of(100);
    ample.window = shape.window;
    const auto reference = tiny_engine(tiny_model(ample));
    std::vector<std::vector<int32_t>> expected;
    for (int32_t kind = 0; kind < 18; ++kind) {
      expected.push_back(helm::test::generated(*reference, {request_of(kind)})[0]);
    }
    const auto engine = tiny_engine(tiny_model(shape));
    Moves all;
    for (const bool keeps : {false, true}) {
      CAPTURE(keeps);
      const auto prefixes = keeps ? std::make_unique<PrefixCache>(*engine) : nullptr;
      const uint32_t schedules = helm::test::kFew ? 3 : 25;
      for (uint32_t seed = 0; seed < schedules; ++seed) {
        CAPTURE(seed);
        const Moves moves = run(*engine, prefixes.get(), seed, expected);
        all.parked += moves.parked;
        all.far += moves.far;
        all.near += moves.near;
        all.waited += moves.waited;
        all.split += moves.split;
      }
      if (keeps) prefixes->clear();
      check_all_free(*engine, engine->plan().kv.blocks);
    }
    const bool sides = engine->moves();
    MESSAGE(name, ": parked ", all.parked, ", moved ", all.far, " times and back ", all.near,
            "; joint ", engine->far_use().joint_steps, "; split ", all.split, "; far rows waited ",
            all.waited);
    const int64_t least = helm::test::kFew ? 0 : 25;
    if (!sides || !helm::test::kFew) CHECK(all.parked > (sides ? 0 : least));
    CHECK((all.far > least) == sides);
    CHECK((all.near > least) == sides);
    const helm::FarUse use = engine->far_use();
    CHECK((use.joint_steps + use.split_steps > 0) == sides);
    CHECK((all.waited > least) == engine->plan().predictor.has_value());
    CHECK((all.split > least) == engine->plan().predictor.has_value());
  }
}

TEST_CASE("requests that grow while both memories are full lie on one side each") {
  TinyShape shape = on_both_sides(1, 1);
  shape.pages = 2 * 20;
  const auto engine = tiny_engine(tiny_model(shape));
  const auto reference = tiny_engine(tiny_model(shape_of(100)));
  for (const bool keeps : {false, true}) {
    CAPTURE(keeps);
    const auto prefixes = keeps ? std::make_unique<PrefixCache>(*engine) : nullptr;
    Driver driver(*engine, prefixes.get(), {}, {8});
    std::map<RequestId, Request> requests;
    for (RequestId id = 0; id < 6; ++id) {
      requests[id].prompt = token_ids(9, static_cast<int32_t>(id));
      requests[id].max_tokens = 60;
      add(driver, *engine, id, requests[id]);
    }
    Received received;
    int64_t full = 0;
    while (!driver.ended()) {
      REQUIRE(driver.step());
      received.take(driver);
      full += engine->far_room() == 0;
      const auto& running = driver.table().running();
      for (const helm::Active* active : running) {
        // What goes on from a kept prefix may have far blocks for a while.
        if (!active->decoding() || running.size() == 1 || keeps) continue;
        const int64_t blocks = (engine->length(active->sequence) + 7) / 8;
        const int64_t near = engine->near_blocks(active->sequence);
        CHECK((near == 0 || near == blocks));
      }
    }
    CHECK(full > 0);
    CHECK(driver.preemptions() > 0);
    for (const auto& [id, request] : requests) {
      CAPTURE(id);
      CHECK(received.tokens[id] == helm::test::generated(*reference, {request})[0]);
    }
    if (keeps) prefixes->clear();
    check_all_free(*engine, engine->plan().kv.blocks);
  }
}

TEST_CASE("the lower class gives way, keeps its place and goes on") {
  const auto engine = tiny_engine(tiny_model(shape_of(8)));
  Driver driver(*engine, nullptr, {}, {8});
  std::map<RequestId, Request> requests;
  for (RequestId id = 0; id < 3; ++id) {
    Request request;
    request.prompt = token_ids(9, static_cast<int32_t>(id));
    request.max_tokens = 40;  // six blocks of eight each
    request.priority = id == 0 ? Request::kBatch : Request::kInteractive;
    requests[id] = request;
    if (id < 2) add(driver, *engine, id, request);
  }
  Received received;
  while (driver.preemptions() == 0) REQUIRE(driver.step());
  CHECK(driver.table().find(0)->timings.parked == 1);
  CHECK(driver.table().find(1)->timings.parked == 0);
  CHECK(driver.waiting_parked() == 1);
  driver.refuse_waiting(std::make_exception_ptr(helm::Error(helm::ErrorKind::kInvalid, "no")));
  CHECK(driver.waiting_parked() == 1);  // it has begun
  requests[2].priority = Request::kBatch;
  add(driver, *engine, 2, requests[2]);
  std::vector<RequestId> ends;
  while (!driver.ended()) {
    REQUIRE(driver.step());
    received.take(driver);
    for (const auto& [id, finish] : received.ended) {
      if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
    }
  }
  CHECK(ends == std::vector<RequestId>{1, 0, 2});
  for (const auto& [id, request] : requests) {
    CHECK(received.tokens[id] == helm::test::generated(*engine, {request})[0]);
  }
  CHECK(driver.table().find(0)->timings.again_tokens > 0);
  CHECK(driver.table().find(0)->timings.prefill_tokens == 9);
}

TEST_CASE("a request larger than all memory is refused at once, the others go on") {
  const auto engine = tiny_engine(tiny_model(shape_of(6)));
  Driver driver(*engine, nullptr);
  Request small = request_of(1), large = request_of(2);
  large.max_tokens = 80;
  add(driver, *engine, 0, small);
  add(driver, *engine, 1, large);
  Received received;
  REQUIRE(driver.step());
  received.take(driver);
  REQUIRE(received.ended.count(1) == 1);
  CHECK(received.ended[1] == Finish::kError);
  CHECK_THROWS_WITH_AS(std::rethrow_exception(driver.table().find(1)->failure),
                       doctest::Contains("blocks of KV pages, there are 6; lower max_tokens"),
                       helm::Error);
  while (!driver.ended()) REQUIRE(driver.step());
  received.take(driver);
  CHECK(received.tokens[0] == helm::test::generated(*engine, {small})[0]);
}

TEST_CASE(
    "growth that finds no block ends one that is alone, and waits for what others give back") {
  const auto engine = tiny_engine(tiny_model(shape_of(6)));
  Request request = request_of(0);
  request.max_tokens = 30;
  const auto want = helm::test::generated(*engine, {request})[0];
  for (const bool returns : {false, true}) {
    CAPTURE(returns);
    const helm::SequenceId held = engine->open(3 * 8);
    Driver driver(*engine, nullptr, {}, {8});
    if (returns) driver.held_by_others(1);
    add(driver, *engine, 0, request);
    Received received;
    while (driver.step()) received.take(driver);
    CHECK(driver.ended() == !returns);
    if (returns) {
      CHECK(driver.waiting_parked() == 1);
      CHECK(received.ended.empty());
    } else {
      CHECK(received.ended[0] == Finish::kError);
      CHECK_THROWS_WITH_AS(std::rethrow_exception(driver.table().find(0)->failure),
                           doctest::Contains("no block of KV pages is left"), helm::Error);
    }
    engine->close(held);
    if (!returns) continue;
    driver.held_by_others(-1);
    while (!driver.ended()) REQUIRE(driver.step());
    received.take(driver);
    CHECK(received.tokens[0] == want);
  }
}

TEST_CASE("a device that is lost while requests are parked or move ends all, with its error") {
  int64_t lost = 0;
  for (int64_t command = 100; command < 2900; command += helm::test::kFew ? 350 : 140) {
    CAPTURE(command);
    const std::array shapes = {on_both_sides(2, 1), on_accelerator(2), with_modes(1, 1e-6)};
    const TinyShape& shape = shapes[static_cast<size_t>(command / 70) % shapes.size()];
    const auto engine = tiny_engine(tiny_model(shape), "sim:lost=" + std::to_string(command));
    PrefixCache prefixes(*engine);
    Driver driver(*engine, &prefixes, {}, {8});
    for (RequestId id = 0; id < 6; ++id) add(driver, *engine, id, request_of(4 * id % 18));
    if (driver.modes() != nullptr) driver.modes()->force(helm::StepMode::kSplit);
    try {
      while (!driver.ended()) driver.step();
    } catch (const helm::Error& error) {
      CHECK(error.kind() == helm::ErrorKind::kDevice);
      ++lost;
      CHECK_THROWS_AS(driver.step(), helm::Error);
      driver.cancel_all();
    }
    CHECK(driver.ended());
    CHECK(driver.reserved_blocks() == 0);
  }
  CHECK(lost > 0);
}
