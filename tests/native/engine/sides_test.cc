// Sequences whose KV lies in host memory as a whole: on every placement the logits of the CPU
// alone, bit by bit where the accelerator has its kernels, whatever else a step has; moves there
// and back, refusals, lost devices. Linked once per kind of accelerator: helm::test::kAccelerator.
#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "helm/engine.h"
#include "support/this_build.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::KvSide;
using helm::SequenceId;
using helm::StepInput;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

const bool kExact = std::string_view(helm::test::kAccelerator).starts_with("sim");
constexpr int64_t kLayers = 3, kContext = 96, kPage = 8, kSlots = 14, kBlocks = 56;

std::unique_ptr<Engine> engine_of(const TinyShape& shape,
                                  const std::string& device = helm::test::kAccelerator) {
  return helm::test::tiny_engine(tiny_model(shape), device);
}

TinyShape on_cpu(const std::string& kv_dtype = "f32") {
  return {.layers = kLayers, .page_tokens = kPage, .context = kContext, .kv_dtype = kv_dtype};
}

TinyShape shape_of(const std::string& units, const std::string& kv_dtype = "f32") {
  TinyShape shape = on_cpu(kv_dtype);
  int64_t own = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    shape.devices.push_back(units[i] == 'a' ? "accelerator" : "cpu");
    own += units[i] == 'a' && i > 0 && i + 1 < units.size();
  }
  shape.pages = kLayers * kBlocks;
  shape.accelerator_pages = own * kSlots;
  shape.overflow = "cpu";
  shape.watermark = 1;
  return shape;
}

void same(std::span<const float> got, std::span<const float> want) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const float bound = kExact ? 0 : 1e-4F * (1 + std::abs(want[i]));
    if (!(std::abs(got[i] - want[i]) <= bound)) {
      FAIL("logit ", i, " is ", got[i], ", expected ", want[i]);
    }
  }
}

// The same sequences on an engine and on one of the CPU alone.
class Pair {
 public:
  explicit Pair(const TinyShape& shape, const std::string& device = helm::test::kAccelerator)
      : tested_(engine_of(shape, device)), reference_(engine_of([&] {
          TinyShape all = on_cpu(shape.kv_dtype);
          all.window = shape.window;
          all.qkv_bias = shape.qkv_bias;
          return all;
        }())) {}

  // Opens a sequence with a prompt.
  size_t open(int64_t length) {
    ids_.push_back({tested_->open(kContext), reference_->open(kContext)});
    step({{ids_.size() - 1, length}});
    return ids_.size() - 1;
  }
  size_t fork(size_t source, int64_t length) {
    const auto [tested, reference] = ids_[source];
    ids_.push_back(
        {tested_->fork(tested, length, kContext), reference_->fork(reference, length, kContext)});
    return ids_.size() - 1;
  }
  void close(size_t i) {
    tested_->close(ids_[i].first);
    reference_->close(ids_[i].second);
  }
  // So many tokens of each in one step, the last `second` in a sub-batch of their own; the logits
  // of all are those of the CPU.
  void step(const std::vector<std::pair<size_t, int64_t>>& rows, size_t second = 0) {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<StepInput> inputs, wanted;
    for (const auto& [i, count] : rows) tokens.push_back(token_ids(count, ++seed_));
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto outputs = StepInput::Outputs::kLast;
      inputs.push_back({ids_[rows[r].first].first, tokens[r], outputs});
      wanted.push_back({ids_[rows[r].first].second, tokens[r], outputs});
    }
    tested_->submit(inputs, second);
    const std::span<const float> got = tested_->collect();
    same(got, reference_->step(wanted));
  }
  int64_t move(size_t i, KvSide side) {
    const int64_t moved = tested_->move(ids_[i].first, side);
    CHECK(tested_->side(ids_[i].first) == side);
    return moved;
  }
  SequenceId id(size_t i) const { return ids_[i].first; }
  Engine& tested() { return *tested_; }

 private:
  std::unique_ptr<Engine> tested_, reference_;
  std::vector<std::pair<SequenceId, SequenceId>> ids_;
  int32_t seed_ = 100;
};

}  // namespace

TEST_CASE("steps of near and far sequences and of prompts have the CPU's logits") {
  for (const char* units : {"ccaaa", "aaaaa", "cacac", "acaca"}) {
    CAPTURE(std::string(units));
    Pair pair(shape_of(units));
    const size_t a = pair.open(30), b = pair.open(17);
    CHECK(pair.tested().near_blocks(pair.id(a)) == 4);
    CHECK(pair.move(a, KvSide::kFar) == 4);
    CHECK(pair.tested().near_blocks(pair.id(a)) == 0);
    CHECK(pair.tested().near_wanted(pair.id(a), 1) == 0);
    for (int i = 0; i < 12; ++i) pair.step({{a, 1}, {b, 1}});  // over the ends of blocks
    const helm::FarUse use = pair.tested().far_use();
    CHECK(use.joint_steps == 12);
    CHECK(use.rows == 12);
    const size_t c = pair.open(9);
    CHECK(pair.move(c, KvSide::kFar) == 2);
    pair.step({{b, 7}, {c, 1}, {a, 1}});  // a prompt's chunk beside far rows
    pair.step({{c, 1}, {b, 1}, {a, 1}});
    CHECK(pair.move(a, KvSide::kNear) == 6);
    pair.step({{c, 1}, {b, 1}, {a, 1}});
    CHECK(pair.tested().stats().page_visits == 0);
    CHECK(pair.tested().far_use().rows == 12 + 2 + 2 + 1);
    CHECK(pair.move(a, KvSide::kNear) == 0);
  }
}

TEST_CASE("also with integers in the cache and keys without their bias" * doctest::skip(!kExact)) {
  for (const bool bias : {false, true}) {
    TinyShape shape = shape_of("caaac", "i8");
    shape.qkv_bias = bias;
    Pair pair(shape);
    const size_t a = pair.open(30), b = pair.open(17);
    pair.move(b, KvSide::kFar);
    for (int i = 0; i < 10; ++i) pair.step({{b, 1}, {a, 1}});
  }
}

TEST_CASE("several tokens of a far sequence, and pages that visit, give the CPU's logits") {
  for (const int64_t window : {0, 21}) {
    CAPTURE(window);
    TinyShape shape = shape_of("ccaaa");
    shape.window = window;
    Pair pair(shape);
    const size_t a = pair.open(30), b = pair.open(11), c = pair.open(5);
    pair.move(a, KvSide::kFar);
    pair.move(c, KvSide::kFar);
    pair.step({{a, 5}, {b, 1}, {c, 1}});  // some pages visit, the CPU attends to others
    CHECK(pair.tested().side(pair.id(a)) == KvSide::kNear);
    CHECK(pair.tested().side(pair.id(c)) == KvSide::kFar);
    CHECK(pair.tested().near_blocks(pair.id(a)) == 2);
    CHECK(pair.tested().stats().page_visits > 0);
    pair.step({{a, 9}, {c, 1}});
    CHECK(pair.move(a, KvSide::kFar) == 3);
    pair.step({{a, 1}, {c, 1}});
    CHECK(pair.move(a, KvSide::kNear) == 6);
    pair.step({{a, 1}, {c, 1}, {b, 3}});
  }
}

TEST_CASE("a step of two sub-batches that take turns has the CPU's logits") {
  const std::string late = "sim:jitter=100us";
  for (const std::string& device : {std::string(helm::test::kAccelerator), late}) {
    if (device == late && !kExact) continue;
    for (const char* units : {"ccaaa", "aaaaa", "cacac", "acaca"}) {
      CAPTURE(device);
      CAPTURE(std::string(units));
      Pair pair(shape_of(units), device);
      REQUIRE(pair.tested().splits());
      const size_t a = pair.open(30), b = pair.open(17), c = pair.open(9), d = pair.open(4);
      pair.move(a, KvSide::kFar);
      pair.move(c, KvSide::kFar);
      pair.move(d, KvSide::kFar);
      for (int i = 0; i < 9; ++i) pair.step({{b, 1}, {d, 1}, {a, 1}, {c, 1}}, 1 + i % 3);
      const helm::FarUse use = pair.tested().far_use();
      CHECK((use.joint_steps == 0 && use.split_steps == 9 && use.rows == 27));
      pair.step({{b, 7}, {d, 1}, {c, 1}, {a, 1}}, 2);  // a prompt's chunk beside far rows
      pair.step({{d, 1}, {a, 1}, {c, 1}}, 1);          // nothing is near
      pair.step({{d, 1}, {a, 1}, {c, 1}}, 3);          // the first is empty
      pair.step({{a, 1}, {b, 1}}, 1);                  // a near one in the second
      pair.step({{a, 5}, {d, 1}, {c, 1}}, 1);          // pages visit
      CHECK(pair.tested().stats().page_visits > 0);
      pair.step({{d, 1}, {c, 1}});
      CHECK(pair.tested().in_flight() == 0);
    }
  }
}

TEST_CASE("sub-batches in integers, with biases and in windows" * doctest::skip(!kExact)) {
  for (const char* dtype : {"f32", "i8"}) {
    CAPTURE(std::string(dtype));
    TinyShape shape = shape_of("caaac", dtype);
    shape.qkv_bias = true;
    shape.window = 21;
    Pair pair(shape);
    const size_t a = pair.open(30), b = pair.open(17), c = pair.open(3);
    pair.move(a, KvSide::kFar);
    pair.move(b, KvSide::kFar);
    for (int i = 0; i < 10; ++i) pair.step({{c, 1}, {b, 1}, {a, 1}}, 1 + i % 2);
  }
}

TEST_CASE("a step that cannot be split is refused, and nothing has changed") {
  const std::vector<int32_t> one = {1}, two = {1, 2};
  const auto check = [&](Engine& engine, const std::vector<int32_t>& tokens, const char* says) {
    std::vector<StepInput> inputs;
    for (int i = 0; i < 2; ++i) inputs.push_back({engine.open(20), tokens});
    CHECK_THROWS_WITH_AS(engine.submit(inputs, 1), doctest::Contains(says), helm::Error);
    CHECK(engine.in_flight() == 0);
    CHECK(engine.length(inputs[0].sequence) == 0);
    engine.step(inputs);
    for (const StepInput& input : inputs) engine.close(input.sequence);
  };
  const auto engine = engine_of(shape_of("ccaaa"));
  check(*engine, two, "2 tokens of sequence 1 are in the second sub-batch of a step; expected one");
  check(*engine_of(on_cpu()), one, "do not let it; submit it whole");
  TinyShape visiting = shape_of("ccaaa");
  visiting.overflow = "stream";
  const auto streams = engine_of(visiting);
  CHECK(!streams->splits());
  check(*streams, one, "do not let it; submit it whole");
}

TEST_CASE("what is shared stays with the others, who go on") {
  Pair pair(shape_of("caaac"));
  for (int round = 0; round < (kExact ? 12 : 1); ++round) {  // more than leaked blocks allow
    const size_t a = pair.open(30), b = pair.fork(a, 30), c = pair.fork(a, 13);
    CHECK(pair.move(a, KvSide::kFar) == 4);
    CHECK(pair.tested().near_blocks(pair.id(b)) == 4);
    for (int i = 0; i < 4; ++i) pair.step({{a, 1}, {b, 1}, {c, 1}});
    const size_t d = pair.fork(a, 20);  // far, too
    CHECK(pair.tested().side(pair.id(d)) == KvSide::kFar);
    pair.step({{d, 1}, {a, 1}});
    CHECK(pair.move(d, KvSide::kNear) == 3);
    CHECK(pair.tested().near_blocks(pair.id(a)) == 0);
    pair.step({{d, 1}, {a, 1}, {b, 4}, {c, 1}});
    for (const size_t i : {a, b, c, d}) pair.close(i);
    CHECK(pair.tested().near_room() == kSlots);
  }
}

TEST_CASE("random moves, forks, cuts and steps") {
  const int schedules = kExact ? 12 : 2;
  for (uint32_t seed = 0; seed < static_cast<uint32_t>(schedules); ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    TinyShape shape = shape_of(random() % 2 == 0 ? "ccaaa" : "acaca");
    shape.step_tokens = 16;
    Pair pair(shape);
    std::vector<size_t> open;
    for (int64_t length : {3, 12, 16}) open.push_back(pair.open(length));
    for (int action = 0; action < 30; ++action) {
      CAPTURE(action);
      const size_t one = open[random() % open.size()];
      const auto side = random() % 2 == 0 ? KvSide::kFar : KvSide::kNear;
      if (random() % 2 == 0 && pair.tested().can_move(pair.id(one), side)) pair.move(one, side);
      if (random() % 6 == 0 && open.size() < 4) {
        const int64_t held = pair.tested().length(pair.id(one));
        open.push_back(pair.fork(one, 1 + static_cast<int64_t>(random()) % held));
      } else if (random() % 9 == 0 && open.size() > 1) {
        pair.close(open.back());
        open.pop_back();
      }
      // One token of a sequence that is partly far, or becomes so, is the CPU's and the
      // accelerator's to attend to, which rounds. Of several its pages visit.
      std::vector<std::pair<size_t, int64_t>> rows;
      int64_t wanted = 0;
      for (const size_t i : open) {
        if (pair.tested().length(pair.id(i)) > kContext - 4) continue;
        const bool far = pair.tested().side(pair.id(i)) == KvSide::kFar;
        const bool whole = far || pair.tested().can_move(pair.id(i), KvSide::kNear);
        if (whole && !far) pair.move(i, KvSide::kNear);
        const auto tokens = static_cast<int64_t>(1 + random() % 4);
        rows.push_back({i, whole ? tokens : std::max<int64_t>(2, tokens)});
        wanted += pair.tested().near_wanted(pair.id(i), rows.back().second);
      }
      for (auto& [i, tokens] : rows) {
        const bool far = pair.tested().side(pair.id(i)) == KvSide::kFar;
        if (wanted > pair.tested().near_room() && !far) tokens = std::max<int64_t>(2, tokens);
      }
      if (!rows.empty()) pair.step(rows);
    }
  }
}

TEST_CASE("what cannot move is refused by name, and nothing has changed") {
  const auto refusal = [](Engine& engine, SequenceId id, KvSide side) {
    CHECK(!engine.can_move(id, side));
    try {
      engine.move(id, side);
    } catch (const helm::Error& error) {
      return std::pair(error.kind(), std::string(error.what()));
    }
    return std::pair(helm::ErrorKind::kIo, std::string("no error"));
  };
  using helm::ErrorKind;
  const auto check = [&](Engine& engine, KvSide side, ErrorKind kind, const char* says) {
    const SequenceId id = engine.open(kContext);
    engine.forward(id, token_ids(20, 1), StepInput::Outputs::kNone, {});
    const auto [found, what] = refusal(engine, id, side);
    CHECK(found == kind);
    CHECK(what.find(says) != std::string::npos);
    CHECK(engine.side(id) == KvSide::kNear);
    engine.forward(id, token_ids(3, 2), StepInput::Outputs::kNone, {});
    engine.close(id);
    CHECK_THROWS_AS(engine.move(id, side), helm::Error);  // it is not open
  };
  check(*engine_of(on_cpu()), KvSide::kFar, ErrorKind::kInvalid, "no KV pages in host memory");
  TinyShape visiting = shape_of("ccaaa");
  visiting.overflow = "stream";
  check(*engine_of(visiting), KvSide::kFar, ErrorKind::kInvalid, "plan for KV overflow on the CPU");
  TinyShape narrow = shape_of("ccaaa");
  narrow.pages = kLayers * (kSlots + 2);
  const auto engine = engine_of(narrow);
  check(*engine, KvSide::kFar, ErrorKind::kCapacity,
        "takes 3 blocks of KV pages and 0 copies of shared ones; 2 are free there");
  CHECK(engine->near_room() == kSlots);
}

TEST_CASE("a device that is lost in the middle of moves ends them with its error" *
          doctest::skip(!kExact)) {
  int64_t lost = 0;
  for (int64_t command = 1; command < 4000; command += 1 + command / 6) {
    CAPTURE(command);
    std::unique_ptr<Engine> engine;
    try {
      engine = engine_of(shape_of("ccaaa"), "sim:lost=" + std::to_string(command));
    } catch (const helm::Error& error) {
      continue;
    }
    const SequenceId a = engine->open(kContext), b = engine->open(kContext);
    try {
      for (const SequenceId id : {a, b}) {
        engine->forward(id, token_ids(20, 1), StepInput::Outputs::kNone, {});
      }
      const auto other = engine->fork(b, 20, kContext);
      const std::vector<int32_t> token = {1};
      for (int i = 0; i < 20; ++i) {
        const SequenceId one = i % 2 == 0 ? a : b;
        const KvSide side = i % 4 < 2 ? KvSide::kFar : KvSide::kNear;
        if (engine->can_move(one, side)) engine->move(one, side);
        const std::vector<StepInput> inputs = {{a, token}, {b, token}, {other, token}};
        engine->submit(inputs, static_cast<size_t>(i % 3));
        engine->collect();
      }
    } catch (const helm::Error& error) {
      CAPTURE(std::string(error.what()));
      CHECK(error.kind() == helm::ErrorKind::kDevice);
      ++lost;
      CHECK_THROWS_AS(engine->forward(a, token_ids(2, 1), StepInput::Outputs::kNone, {}),
                      helm::Error);
      engine->close(a);
      engine->close(b);
      CHECK(engine->can_open(kContext));
    }
  }
  CHECK(lost > 10);
}

TEST_CASE("late copies change nothing" * doctest::skip(!kExact)) {
  for (const char* device : {"sim:jitter=100us", "sim:link=200MB/s", "sim:latency=200us"}) {
    CAPTURE(std::string(device));
    const auto late = engine_of(shape_of("acaca"), device), punctual = engine_of(on_cpu());
    std::vector<SequenceId> ids;
    for (int32_t i = 0; i < 3; ++i) {
      for (Engine* engine : {late.get(), punctual.get()}) {
        ids.push_back(engine->open(kContext));
        engine->forward(ids.back(), token_ids(20 + i, i), StepInput::Outputs::kNone, {});
      }
    }
    const std::vector<int32_t> token = {7};
    for (int i = 0; i < 12; ++i) {
      const size_t moved = 2 * static_cast<size_t>(i % 3);
      late->move(ids[moved],
                 late->side(ids[moved]) == KvSide::kNear ? KvSide::kFar : KvSide::kNear);
      std::vector<StepInput> inputs, wanted;
      for (const size_t s : {0, 2, 4}) inputs.push_back({ids[s], token});
      for (const size_t s : {1, 3, 5}) wanted.push_back({ids[s], token});
      same(late->step(inputs), punctual->step(wanted));
    }
  }
}
