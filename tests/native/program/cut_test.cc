// Layers and heads cut between the CPU and a simulated accelerator: the bits are those of the same
// parts one after the other on the CPU, however late commands begin; and what fails is said.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::StepInput;
using helm::test::kFew;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyCut;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr TinyCut kCpu{1, 32}, kGpu{2, 64, false}, kAttention{2, 0}, kMlp{0, 32, false}, kNone{};

struct Kind {
  const char* places;  // of what is not cut: the embedding, every layer and the head
  std::vector<TinyCut> cuts;
  int64_t cut_rows = 0;
  bool visits = false;
  std::vector<std::string> visiting = {};  // tensors of the accelerator, in every step
};

const Kind kKinds[] = {
    {"ccccc", {kCpu, kCpu, kCpu}, 30},
    {"caaac", {kGpu, kGpu, kGpu}},
    {"ccaac", {kCpu, kNone, kGpu}, 7},
    {"accac", {kNone, kAttention, kMlp}},
    {"caccc", {kMlp, kNone, kAttention}, 60},
    {"ccccc", {kCpu, kCpu, kCpu}, 30, true},
    {"cacac", {kGpu, kNone, kCpu}, 30, true},
    {"caaca", {kCpu, kMlp, kGpu}, 0, true},
    {"caaac", {kGpu, kNone, kCpu}, 30, false, {"block.1", "block.0.q", "block.2.down"}},
};

TinyShape shape_of(const Kind& kind) {
  TinyShape shape{.inter = 72, .layers = 3, .heads = 6, .kv_heads = 3, .head_dim = 16};
  shape.qk_norm = true;
  shape.qkv_bias = true;
  shape.sequences = 3;
  shape.pages = 3 * 39;
  for (const char* place = kind.places; *place != 0; ++place) {
    shape.devices.push_back(*place == 'a' ? "accelerator" : "cpu");
  }
  shape.cuts = kind.cuts;
  shape.cut_rows = kind.cut_rows;
  shape.visiting = kind.visiting;
  shape.visit_buffers = 3;
  if (kind.visits) {
    shape.visit_tokens = 9;
    shape.visit_pages = 24;
  }
  return shape;
}

// The same parts, all on the CPU.
TinyShape in_turn(TinyShape shape) {
  shape.devices.assign(shape.devices.size(), "cpu");
  shape.cut_on_cpu = true;
  shape.visit_tokens = 0;
  return shape;
}

std::vector<std::vector<int32_t>> generate(Engine& engine, int32_t seed = 0) {
  std::vector<helm::Request> requests(4);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto n = static_cast<int32_t>(i);
    requests[i].prompt = token_ids(3 + 23 * n, seed + n);
    requests[i].max_tokens = 5 + 3 * n;
  }
  return helm::test::generated(engine, requests);
}

// Of a prompt, of every position if that is one step, then of single tokens.
std::vector<float> logits(Engine& engine, int64_t prompt) {
  const std::vector<int32_t> ids = token_ids(prompt + 5, 3);
  std::vector<float> all;
  const auto keep = [&](std::span<const float> rows) {
    all.insert(all.end(), rows.begin(), rows.end());
  };
  const helm::SequenceId sequence = engine.open(std::ssize(ids));
  const std::span tokens(ids);
  engine.forward(sequence, tokens.first(static_cast<size_t>(prompt)),
                 prompt > 8 ? StepInput::Outputs::kLast : StepInput::Outputs::kAll, keep);
  for (int64_t i = prompt; i < std::ssize(ids); ++i) {
    engine.forward(sequence, tokens.subspan(static_cast<size_t>(i), 1), StepInput::Outputs::kLast,
                   keep);
  }
  engine.close(sequence);
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("what is cut has the bits of its parts in turn on the CPU") {
  for (const Kind& kind : helm::test::sampled(kKinds)) {
    CAPTURE(std::string(kind.places));
    const TinyShape shape = shape_of(kind);
    const auto want = tiny_engine(tiny_model(in_turn(shape)));
    const auto tokens = generate(*want);
    for (const char* device : {"sim:jitter=60us", "sim", "sim:link=50MB/s,latency=50us"}) {
      if (kFew && device != std::string("sim:jitter=60us")) continue;
      CAPTURE(device);
      const auto got = tiny_engine(tiny_model(shape), device);
      CHECK(generate(*got) == tokens);
      for (const int64_t prompt : {1, 8, 17}) {
        CHECK(same_bits(logits(*got, prompt), logits(*want, prompt)));
      }
      CHECK((got->stats().streamed_steps > 0) == (kind.visits || !kind.visiting.empty()));
    }
  }
}

TEST_CASE("a second step may be submitted before the first is collected") {
  for (const Kind& kind : helm::test::sampled(kKinds)) {
    CAPTURE(std::string(kind.places));
    const TinyShape shape = shape_of(kind);
    const auto want = tiny_engine(tiny_model(in_turn(shape)));
    const auto got = tiny_engine(tiny_model(shape), "sim:jitter=30us");
    for (const auto& [first, second] : {std::pair{1, 1}, {12, 1}, {1, 12}, {12, 15}}) {
      std::vector<std::vector<float>> rows[2];
      for (Engine* engine : {want.get(), got.get()}) {
        std::vector<std::vector<float>>& all = rows[engine == got.get()];
        const auto a = token_ids(first, 1), b = token_ids(second, 2);
        const StepInput inputs[] = {{engine->open(20), a, StepInput::Outputs::kLast},
                                    {engine->open(20), b, StepInput::Outputs::kLast}};
        const auto collect = [&] {
          const std::span<const float> found = engine->collect();
          all.emplace_back(found.begin(), found.end());
        };
        for (const StepInput& input : inputs) {
          if (engine->in_flight() == engine->steps_ahead()) collect();
          engine->submit({&input, 1});
        }
        while (engine->in_flight() > 0) collect();
        for (const StepInput& input : inputs) engine->close(input.sequence);
      }
      REQUIRE(rows[0].size() == rows[1].size());
      for (size_t i = 0; i < rows[0].size(); ++i) CHECK(same_bits(rows[0][i], rows[1][i]));
    }
  }
}

TEST_CASE("every allocation of what is cut may be refused") {
  for (const Kind& kind : helm::test::sampled(kKinds)) {
    CAPTURE(std::string(kind.places));
    const TinyShape shape = shape_of(kind);
    const auto model = tiny_model(shape);
    const auto tokens = generate(*tiny_engine(tiny_model(in_turn(shape))));
    int64_t refused = 0;
    for (;; refused += kFew ? 3 : 1) {
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
    CHECK(refused > 5);
  }
}

TEST_CASE("a device that is lost at any task of a cut step ends it with an error, and all others") {
  for (const Kind& kind : helm::test::sampled(kKinds)) {
    CAPTURE(std::string(kind.places));
    const auto model = tiny_model(shape_of(kind));
    int64_t lost_while_running = 0;
    const int64_t kEach = kFew ? 1 : 50, kPart = kFew ? 2 : 4;  // first each, then fewer
    for (int64_t command = 1; command < 4000;
         command += command < kEach ? 1 : 1 + command / kPart) {
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
    CHECK(lost_while_running > (kFew ? 4 : 12));
  }
}
