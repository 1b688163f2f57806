// The engine on a small model: results that do not depend on batch, chunks, pages or threads; the
// bookkeeping of sequences and pages; refusals that leave nothing half-done.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "cpu/isa.h"
#include "cpu/stage.h"
#include "helm/generation.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::StepInput;
using helm::test::generated;
using helm::test::logits_of;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

helm::Request request(std::vector<int32_t> prompt, int64_t max_tokens) {
  helm::Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  return request;
}

}  // namespace

TEST_CASE("logits are bit-identical for every chunking, page size and thread count") {
  const std::vector<int32_t> ids = token_ids(150, 1);
  for (const auto& [window, dtype] : {std::pair{0, "f32"}, {21, "f32"}, {0, "i8"}, {21, "i8"}}) {
    const auto reference_model = tiny_model({.window = window, .kv_dtype = dtype});
    const std::vector<float> reference = logits_of(*tiny_engine(reference_model), ids, 150);
    REQUIRE(reference.size() == 61);
    for (const size_t chunk : {1, 7, 16, 31, 64}) {
      CHECK(logits_of(*tiny_engine(reference_model), ids, chunk) == reference);
    }
    for (const int threads : {1, 3}) {
      const auto model = tiny_model({.window = window, .kv_dtype = dtype, .threads = threads});
      CHECK(logits_of(*tiny_engine(model), ids, 150) == reference);
    }
    for (const int64_t page_tokens : {1, 5, 64, 256}) {
      const auto model = tiny_model(
          {.page_tokens = page_tokens, .pages = 2000, .window = window, .kv_dtype = dtype});
      const std::vector<float> other = logits_of(*tiny_engine(model), ids, 40);
      for (size_t i = 0; i < reference.size(); ++i) {
        // Another grouping of the same softmax sums: a few roundings of values of order one. They
        // may push a later key or value to the next integer, which is a 127th of its row's largest.
        const float bound = std::string(dtype) == "i8" ? 0.02F : 1e-4F;
        CHECK(std::abs(other[i] - reference[i]) <= bound * (1 + std::abs(reference[i])));
      }
    }
  }
}

TEST_CASE("a batch of sequences gives each what it gets alone") {
  for (const char* dtype : {"f32", "i8"}) {
    const auto engine = tiny_engine(tiny_model({.kv_dtype = dtype}));
    std::vector<helm::Request> requests;
    std::vector<std::vector<int32_t>> alone;
    for (int32_t i = 0; i < 9; ++i) {  // more than can be open at once
      helm::Request one = request(token_ids(1 + 13 * i, i), 5 + i);
      one.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
      one.sampling.seed = static_cast<uint64_t>(i);
      alone.push_back(generated(*engine, {one})[0]);
      requests.push_back(std::move(one));
    }
    CHECK(generated(*engine, requests) == alone);
  }
}

TEST_CASE("greedy generation equals repeated forward passes") {
  const auto engine = tiny_engine(tiny_model());
  std::vector<int32_t> ids = token_ids(20, 3);
  const std::vector<int32_t> found = generated(*engine, {request(ids, 12)})[0];
  REQUIRE(found.size() == 12);
  for (const int32_t token : found) {
    const std::vector<float> logits = logits_of(*engine, ids, 32);
    CHECK(std::max_element(logits.begin(), logits.end()) - logits.begin() == token);
    ids.push_back(token);
  }
}

TEST_CASE("truncating and continuing equals a fresh sequence") {
  const auto engine = tiny_engine(tiny_model());
  const std::vector<int32_t> first = token_ids(60, 1);
  std::vector<int32_t> second(first.begin(), first.begin() + 33);
  for (const int32_t id : token_ids(20, 9)) second.push_back(id);
  const std::vector<float> fresh = logits_of(*engine, second, 32);

  const helm::SequenceId sequence = engine->open(100);
  engine->forward(sequence, first, StepInput::Outputs::kLast, [](std::span<const float>) {});
  engine->truncate(sequence, 33);
  CHECK(engine->length(sequence) == 33);
  std::vector<float> continued;
  engine->forward(sequence, std::span(second).subspan(33), StepInput::Outputs::kLast,
                  [&](std::span<const float> row) { continued.assign(row.begin(), row.end()); });
  CHECK(continued == fresh);
}

TEST_CASE("pages come back: far more sequences than fit at once") {
  const auto model = tiny_model({.pages = 2 * 13});  // one full context
  const auto engine = tiny_engine(model);
  const std::vector<float> reference = logits_of(*engine, token_ids(190, 1), 32);
  for (int round = 0; round < 20; ++round) {
    CHECK(logits_of(*engine, token_ids(190, 1), 32) == reference);
  }
}

TEST_CASE("limits are refused with the numbers and nothing changes") {
  const auto engine = tiny_engine(tiny_model({.pages = 2 * 13}));
  CHECK_THROWS_AS(engine->open(201), helm::Error);
  CHECK_THROWS_AS(engine->open(0), helm::Error);
  const helm::SequenceId sequence = engine->open(150);
  CHECK_THROWS_AS(engine->open(100), helm::Error);  // pages
  const std::vector<int32_t> bad = {1, 2, 61};
  const StepInput input{sequence, bad, StepInput::Outputs::kLast};
  CHECK_THROWS_AS(engine->step({&input, 1}), helm::Error);
  const StepInput closed{99, bad, StepInput::Outputs::kLast};
  CHECK_THROWS_AS(engine->step({&closed, 1}), helm::Error);
  const std::vector<int32_t> good = {1, 2, 3};
  const StepInput twice[] = {{sequence, good, StepInput::Outputs::kLast},
                             {sequence, good, StepInput::Outputs::kLast}};
  CHECK_THROWS_AS(engine->step(twice), helm::Error);
  CHECK(engine->length(sequence) == 0);
  const std::vector<int32_t> long_tokens = token_ids(151, 1);
  CHECK_THROWS_AS(engine->forward(sequence, long_tokens, StepInput::Outputs::kNone,
                                  [](std::span<const float>) {}),
                  helm::Error);
  engine->close(sequence);
  CHECK(engine->can_open(200));
}

TEST_CASE("a bad request stops the whole generation before anything starts") {
  const auto engine = tiny_engine(tiny_model());
  const auto refused = [&](helm::Request bad) {
    CHECK_THROWS_AS(helm::Generation(*engine, {request(token_ids(3, 1), 4), std::move(bad)}),
                    helm::Error);
  };
  refused(request({}, 4));
  refused(request({1, -1}, 4));
  refused(request({1, 61}, 4));
  refused(request({1}, 0));
  refused(request(token_ids(201, 1), 4));
  helm::Request bad = request({1}, 4);
  bad.sampling.temperature = std::nanf("");
  refused(bad);
  bad = request({1}, 4);
  bad.sampling.top_p = 0;
  refused(bad);
  CHECK(engine->can_open(200));
}

TEST_CASE("stop tokens, length and context end a request") {
  const auto engine = tiny_engine(tiny_model());
  const std::vector<int32_t> full = generated(*engine, {request(token_ids(5, 2), 30)})[0];
  REQUIRE(full.size() == 30);
  helm::Request stopping = request(token_ids(5, 2), 30);
  stopping.stop_tokens = {full[10]};
  helm::Generation generation(*engine, {stopping, request(token_ids(195, 1), 100)});
  std::vector<helm::Token> last(2);
  std::vector<int> counts(2, 0);
  while (!generation.done()) {
    for (helm::Token& token : generation.advance(0)) {
      ++counts[static_cast<size_t>(token.request)];
      last[static_cast<size_t>(token.request)] = token;
    }
  }
  const auto first_stop = std::find(full.begin(), full.end(), full[10]) - full.begin();
  CHECK(counts[0] == first_stop + 1);
  CHECK(last[0].finish == helm::Finish::kStop);
  CHECK(counts[1] == 6);  // positions 195 to 199, and the token after the last
  CHECK(last[1].finish == helm::Finish::kLength);
}

TEST_CASE("a request that continues an open sequence ends where that sequence ends") {
  const auto engine = tiny_engine(tiny_model());
  const std::vector<int32_t> prompt = token_ids(20, 5);
  const std::vector<int32_t> expected = generated(*engine, {request(prompt, 11)})[0];
  const helm::SequenceId sequence = engine->open(30);
  engine->forward(sequence, std::span(prompt).first(12), StepInput::Outputs::kNone,
                  [](std::span<const float>) {});
  helm::Request next = request(prompt, 100);
  next.sequence = sequence;
  next.cached = 12;
  CHECK_THROWS_AS(helm::Generation(*engine, {next, next}), helm::Error);
  CHECK(generated(*engine, {next})[0] == expected);
  CHECK(engine->length(sequence) == 30);
  helm::Request longer = request(token_ids(31, 5), 1);
  longer.sequence = sequence;
  longer.cached = 30;
  CHECK_THROWS_AS(helm::Generation(*engine, {longer}), helm::Error);
}

TEST_CASE("cancelling frees the sequence and leaves the others alone") {
  const auto engine = tiny_engine(tiny_model());
  const std::vector<int32_t> expected = generated(*engine, {request(token_ids(9, 4), 20)})[0];
  helm::Generation generation(*engine,
                              {request(token_ids(50, 1), 100), request(token_ids(9, 4), 20)});
  std::vector<int32_t> kept;
  for (int step = 0; !generation.done(); ++step) {
    if (step == 5) generation.cancel(0);
    for (const helm::Token& token : generation.advance(0)) {
      if (token.request == 1) kept.push_back(token.id);
      CHECK((token.request == 1 || step < 5));
    }
  }
  CHECK(kept == expected);
  for (int i = 0; i < 4; ++i) engine->open(200);
}

TEST_CASE("a cache of fewer bits stays close to the f32 one") {
  const std::vector<int32_t> ids = token_ids(100, 6);
  const std::vector<float> exact = logits_of(*tiny_engine(tiny_model()), ids, 100);
  for (const std::string dtype : {"f16", "bf16", "i8"}) {
    // Over bf16 keys and values some tiers round queries and weights too.
    const float most = dtype == "bf16" ? 0.1F : 0.05F;
    const std::vector<float> rounded =
        logits_of(*tiny_engine(tiny_model({.kv_dtype = dtype})), ids, 100);
    CHECK(rounded != exact);
    for (size_t i = 0; i < exact.size(); ++i) {
      CHECK(std::abs(rounded[i] - exact[i]) <= most * (1 + std::abs(exact[i])));
    }
  }
}

TEST_CASE("times of ops are counted while asked for, and change nothing") {
  const helm::test::TinyModel model = tiny_model();
  const auto engine = tiny_engine(model);
  const std::vector<int32_t> ids = token_ids(40, 1);
  const std::vector<float> before = logits_of(*engine, ids, 32);
  CHECK(engine->stats().cpu_ops.empty());
  engine->count_op_times(true);
  CHECK(logits_of(*engine, ids, 32) == before);  // two steps
  engine->count_op_times(false);
  CHECK(logits_of(*engine, ids, 32) == before);
  std::map<std::string, int64_t> runs, expected;
  for (const helm::OpTime& time : engine->stats().cpu_ops) {
    CHECK(time.seconds > 0);
    runs[time.op] = time.runs;
  }
  for (const helm::UnitSpec& unit : engine->plan().units) {
    for (const helm::Op& op : unit.ops) expected[helm::op_kind_name(helm::op_kind(op))] += 2;
  }
  expected["rope"] += 2;  // its tables, once per step and stage
  CHECK(runs == expected);
}

TEST_CASE("a row of position embeddings fits each thread's scratch, however wide") {
  const int64_t width = int64_t{1} << 22;
  helm::Plan plan;
  plan.limits = {.context = 4, .step_tokens = 1, .step_outputs = 1, .sequences = 1};
  plan.tensors = {{"positions", {4, width}, std::nullopt, std::nullopt}};
  plan.slices = {{0, false, helm::format_of(helm::DType::kF16), {}}};
  plan.values = {{"x", width, false}};
  plan.units = {{.name = "embedding", .ops = {helm::PositionEmbeddingOp{0, 0, 0}}}};
  const helm::cpu::KernelTable& kernels = helm::cpu::select_kernels();
  const auto bytes = [&](int threads) {
    return helm::cpu::CpuStage::workspace_bytes(plan, plan.units, kernels, threads);
  };
  CHECK(bytes(2) - bytes(1) >= width * int64_t{sizeof(float)});
}

TEST_CASE("resizing is possible or refused, whatever is asked for") {
  const auto engine = tiny_engine(tiny_model());
  const helm::SequenceId sequence = engine->open(40);
  engine->forward(sequence, token_ids(20, 1), StepInput::Outputs::kNone, {});
  for (const int64_t length : {-1, 0, 1, 20, 21, 33, 200, 1000000}) {
    for (const int64_t capacity : {-1, 0, 1, 20, 40, 200, 201}) {
      CAPTURE(length);
      CAPTURE(capacity);
      const bool sound = length >= 0 && length <= 20 && capacity >= std::max<int64_t>(length, 1) &&
                         capacity <= 200;
      CHECK(engine->can_resize(sequence, length, capacity) == sound);
      if (!sound) CHECK_THROWS_AS(engine->resize(sequence, length, capacity), helm::Error);
    }
  }
}

namespace {

// Matrices that become smaller, one of them with more columns than are made plain at a time.
TinyShape compressible(std::vector<std::string> devices = {}) {
  TinyShape shape{.hidden = 250, .inter = 2300, .weight_dtype = "bf16"};
  shape.devices = std::move(devices);
  shape.accelerator_pages = shape.devices.empty() ? 0 : 200;
  return shape;
}

std::unique_ptr<Engine> compressed_engine(const helm::test::TinyModel& model) {
  return tiny_engine(model.with_slices("cpu", "format", "bf16", "bf16c"));
}

}  // namespace

TEST_CASE("compressed weights take and read less, and give the same bits") {
  const std::vector<int32_t> ids = token_ids(helm::test::kFew ? 40 : 150, 1);
  for (const std::vector<std::string>& devices :
       {std::vector<std::string>{},
        {"cpu", "accelerator", "cpu", "cpu"},
        {"accelerator", "cpu", "accelerator", "accelerator"}}) {
    if (helm::test::kFew && devices.empty()) continue;
    const auto model = tiny_model(compressible(devices));
    const auto copied = tiny_engine(model), compressed = compressed_engine(model);
    for (const size_t chunk : helm::test::sampled({5, 1, 32})) {
      CHECK(logits_of(*compressed, ids, chunk) == logits_of(*copied, ids, chunk));
    }
    const helm::EngineStats less = compressed->stats(), more = copied->stats();
    CHECK(less.devices[0].weights_bytes < more.devices[0].weights_bytes * 9 / 10);
    CHECK(less.decode_bytes < more.decode_bytes);
    CHECK(less.copied_bytes >= less.devices[0].weights_bytes);
    if (!devices.empty()) {
      CHECK(less.devices[1].weights_bytes == more.devices[1].weights_bytes);
    }
    const char* file = "compressed_weights_test.kv";
    const helm::SequenceId sequence = copied->open(40);
    copied->forward(sequence, std::span(ids).first(20), StepInput::Outputs::kLast,
                    [](std::span<const float>) {});
    copied->save(sequence, std::span(ids).first(20), file);
    CHECK(compressed->load(file, 40).tokens.size() == 20);  // knows the weights for the same
    std::remove(file);
  }
}

TEST_CASE("weights that do not compress are refused by name") {
  auto model = tiny_model(compressible());
  std::vector<float>& weights = *model.tensors.at("block.1.up").data;
  for (size_t i = 0; i < weights.size(); i += 50) weights[i] = 1e-30F;
  CHECK_THROWS_WITH(
      compressed_engine(model),
      "[load] the weights of tensor \"block.1.up\" do not compress: more than one in "
      "256 lies outside of the 16 binades that most of its row take; load with copied "
      "weights instead");
}
