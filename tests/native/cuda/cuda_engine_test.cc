// What whole engines ask of a CUDA device, counted in the emulation.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cuda_emulation.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::test::generated;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

// Greedy tokens after a prompt of so many.
std::vector<int32_t> generate(Engine& engine, int64_t prompt) {
  helm::Request request;
  request.prompt = token_ids(prompt, 1);
  request.max_tokens = 4;
  return generated(engine, {request}).front();
}

std::vector<float> last_logits(Engine& engine, const std::vector<int32_t>& ids, size_t chunk) {
  const auto sequence = engine.open(static_cast<int64_t>(ids.size()));
  std::vector<float> last;
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const auto part = std::span(ids).subspan(begin, std::min(chunk, ids.size() - begin));
    engine.forward(sequence, part, helm::StepInput::Outputs::kLast,
                   [&](std::span<const float> row) { last.assign(row.begin(), row.end()); });
  }
  engine.close(sequence);
  return last;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("packed weights on the card, some of its blocks visiting: logits near the CPU's") {
  const std::vector<int32_t> ids = token_ids(70, 4);
  TinyShape on_card, split, visiting;
  on_card.devices = {"accelerator", "accelerator", "accelerator", "accelerator"};
  on_card.pages = on_card.accelerator_pages = 100;
  split.devices = {"cpu", "cpu", "accelerator", "accelerator"};
  split.accelerator_pages = 100;
  visiting = split;
  visiting.visit_tokens = 16, visiting.visit_pages = 40;
  for (const char* format : {"c8.s32", "c4.km32"}) {
    CAPTURE(std::string(format));
    const auto engine_of = [&](TinyShape shape, const char* device) {
      shape.weight_dtype = format, shape.qkv_bias = true;
      return helm::test::tiny_engine(tiny_model(shape), device);
    };
    const std::vector<float> want = last_logits(*engine_of({}, "sim"), ids, 32);
    for (const TinyShape& shape : {on_card, split, visiting}) {
      const auto engine = engine_of(shape, "cuda");
      // In steps of few tokens products have the CPU's bits, but norms and attention do not, and
      // an integer of the activations may fall to the other side.
      CHECK(distance(last_logits(*engine, ids, 8), want) < 1e-3);
      // In steps of many the activations are rounded otherwise.
      CHECK(distance(last_logits(*engine, ids, 32), want) < 0.05);
      CHECK(engine->stats().streamed_steps == (shape.visit_tokens > 0 ? 2 : 0));
    }
    // GPUs before Ampere, which is what is emulated, multiply in f16, others in bf16.
    const std::vector<float> in_f16 = last_logits(*engine_of(on_card, "cuda"), ids, 32);
    cuda_emulation::set_compute_capability(8, 0);
    const std::vector<float> in_bf16 = last_logits(*engine_of(on_card, "cuda"), ids, 32);
    cuda_emulation::set_compute_capability(7, 5);
    CHECK(in_f16 != in_bf16);
    CHECK(distance(in_f16, in_bf16) < 0.05);
    // What a sequence gets does not depend on those beside it.
    std::vector<helm::Request> requests;
    std::vector<std::vector<int32_t>> alone;
    const auto engine = engine_of(on_card, "cuda");
    for (int32_t i = 0; i < 4; ++i) {
      helm::Request one;
      one.prompt = token_ids(1 + 2 * i, i);
      one.max_tokens = 5;
      alone.push_back(generated(*engine, {one})[0]);
      requests.push_back(std::move(one));
    }
    CHECK(generated(*engine, requests) == alone);
  }
}

TEST_CASE("layers and head cut between the CPU and a card: logits near the CPU's, tables once") {
  const std::vector<int32_t> ids = token_ids(40, 4);
  TinyShape shape = helm::test::cut_shape();
  shape.pages = 100;
  const auto on_cpu = helm::test::tiny_engine(tiny_model(shape));
  const std::vector<float> want = last_logits(*on_cpu, ids, 20);
  shape.devices = {"cpu", "cpu", "cpu", "cpu"};
  shape.cut_on_cpu = false;
  TinyShape visiting = shape;
  visiting.visit_tokens = 16, visiting.visit_pages = 40;
  for (const TinyShape& one : {shape, visiting}) {
    const auto engine = helm::test::tiny_engine(tiny_model(one), "cuda");
    CHECK(distance(last_logits(*engine, ids, 20), want) < 1e-5);
    CHECK(engine->stats().streamed_steps == (one.visit_tokens > 0 ? 2 : 0));
    const std::vector<int32_t> next = {5};
    const auto sequence = engine->open(20);
    for (int step = 0; step < 4; ++step) {  // plain, captured, replayed
      const int64_t uploads = cuda_emulation::uploads();
      const helm::StepInput input{sequence, next, helm::StepInput::Outputs::kLast};
      engine->step({&input, 1});
      // The tables, and what crosses: of layer 0 h twice, of layer 1, which is at home there, x and
      // two partial sums, of the head h.
      CHECK(cuda_emulation::uploads() - uploads == 1 + 2 + 3 + 1);
    }
    engine->close(sequence);
  }
}

TEST_CASE("the pieces of a step with far KV pages have one upload of tables") {
  for (const char* site : {"cpu", "stream"}) {
    CAPTURE(std::string(site));
    TinyShape shape;
    shape.layers = 3;
    shape.context = 200;
    shape.sequences = 1;
    shape.step_tokens = 16;
    shape.devices = {"cpu", "accelerator", "accelerator", "accelerator", "accelerator"};
    shape.pages = 3 * 13;
    shape.accelerator_pages = 3 * 5;
    shape.overflow = site;
    const auto engine = helm::test::tiny_engine(tiny_model(shape), "cuda");
    const auto sequence = engine->open(200);
    engine->forward(sequence, token_ids(150, 1), helm::StepInput::Outputs::kNone, {});
    const std::vector<int32_t> next = {5};
    for (int step = 0; step < 4; ++step) {  // plain, captured, replayed
      const helm::EngineStats before = engine->stats();
      const int64_t uploads = cuda_emulation::uploads();
      const helm::StepInput input{sequence, next, helm::StepInput::Outputs::kLast};
      engine->step({&input, 1});
      const helm::EngineStats after = engine->stats();
      const int64_t visits = after.page_visits - before.page_visits;
      const int64_t attentions = after.cpu_attentions - before.cpu_attentions;
      CHECK(visits + attentions > 0);
      // The tables, the embedding's rows, and what lies in host memory.
      CHECK(cuda_emulation::uploads() - uploads == 1 + 1 + visits + attentions);
    }
    engine->close(sequence);
  }
}

TEST_CASE("each sub-batch of a split step has one upload of tables") {
  TinyShape shape;
  shape.layers = 3;
  shape.context = 200;
  shape.step_tokens = 64;
  shape.devices = {"cpu", "accelerator", "accelerator", "accelerator", "accelerator"};
  shape.pages = 3 * 40;
  shape.accelerator_pages = 3 * 20;
  shape.overflow = "cpu";
  const auto engine = helm::test::tiny_engine(tiny_model(shape), "cuda");
  REQUIRE(engine->splits());
  std::vector<helm::SequenceId> sequences;
  for (const bool far : {false, true, true}) {
    sequences.push_back(engine->open(200));
    engine->forward(sequences.back(), token_ids(40, 1), helm::StepInput::Outputs::kNone, {});
    if (far) engine->move(sequences.back(), helm::KvSide::kFar);
  }
  const std::vector<int32_t> next = {5};
  std::vector<helm::StepInput> inputs;
  for (const helm::SequenceId sequence : sequences) {
    inputs.push_back({sequence, next, helm::StepInput::Outputs::kLast});
  }
  for (int step = 0; step < 4; ++step) {  // plain, captured, replayed
    const helm::EngineStats before = engine->stats();
    const int64_t uploads = cuda_emulation::uploads();
    engine->submit(inputs, 1);
    engine->collect();
    const helm::EngineStats after = engine->stats();
    const int64_t attentions = after.cpu_attentions - before.cpu_attentions;
    CHECK(after.split_steps - before.split_steps == 1);
    CHECK(attentions == 2 * 3);  // a far row in either sub-batch
    // Of each the tables and the embedding's rows, and what the CPU has attended.
    CHECK(cuda_emulation::uploads() - uploads == 2 * (1 + 1) + attentions);
  }
  for (const helm::SequenceId sequence : sequences) engine->close(sequence);
}

TEST_CASE("packed weights of a step with far KV pages find their own place in the workspace") {
  TinyShape shape;
  shape.hidden = 64;
  shape.inter = 96;
  shape.head_dim = 16;
  shape.sequences = 1;
  shape.step_tokens = 16;  // more than a product takes without cuBLAS
  shape.devices = {"cpu", "accelerator", "accelerator", "accelerator"};
  shape.weight_dtype = "c8.s32";
  shape.pages = 2 * 13;
  std::vector<std::vector<float>> found;
  for (const int64_t blocks : {13, 5}) {
    shape.accelerator_pages = 2 * blocks;
    const auto engine = helm::test::tiny_engine(tiny_model(shape), "cuda");
    const auto sequence = engine->open(200);
    engine->forward(
        sequence, token_ids(150, 1), helm::StepInput::Outputs::kLast,
        [&](std::span<const float> row) { found.emplace_back(row.begin(), row.end()); });
    CHECK((engine->stats().page_visits > 0) == (blocks == 5));
    engine->close(sequence);
  }
  float largest = 0, difference = 0;
  for (size_t i = 0; i < found[0].size(); ++i) {
    largest = std::max(largest, std::abs(found[0][i]));
    difference = std::max(difference, std::abs(found[0][i] - found[1][i]));
  }
  CHECK(difference < 0.05F * largest);
}

TEST_CASE("stages of a step share its tables, layers that visit among them") {
  TinyShape shape;
  shape.layers = 3;
  shape.devices = {"accelerator", "cpu", "accelerator", "cpu", "accelerator"};
  shape.pages = 3 * 13 * 4;
  shape.accelerator_pages = 13 * 4;
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  shape.weight_dtype = "f16";
  const auto engine = helm::test::tiny_engine(tiny_model(shape), "cuda");
  const auto sequence = engine->open(100);
  const auto count = [&](int64_t tokens) {
    const int64_t before = cuda_emulation::uploads();
    engine->forward(sequence, token_ids(tokens, 1), helm::StepInput::Outputs::kLast,
                    [](std::span<const float>) {});
    return cuda_emulation::uploads() - before;
  };
  constexpr int64_t kTensors = 9;  // of a layer that visits
  CHECK(count(30) == 1 + 2 * kTensors);
  CHECK(count(1) == 1 + 2);  // what crosses to the second and third stage there
  engine->close(sequence);
}

TEST_CASE("weights and KV that visit are page-locked, or told to be pageable") {
  TinyShape shape;
  shape.devices = {"cpu", "cpu", "cpu", "accelerator"};
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  const helm::test::TinyFolder folder;
  const helm::test::TinyModel copied = tiny_model(shape), mapped = folder.mapped(copied);
  helm::EngineOptions options;
  options.directory = folder.path();
  const auto count = [&](const helm::test::TinyModel& model, int64_t* pageable_bytes) {
    Engine engine(helm::Plan::from_json(model.plan), options);
    *pageable_bytes = engine.stats().pageable_bytes;
    const int64_t before = cuda_emulation::pageable_copies();
    const auto tokens = generate(engine, 70);
    CHECK(engine.stats().streamed_steps == 2);  // of 32 tokens; 6 are computed where they lie
    return std::pair(tokens, cuda_emulation::pageable_copies() - before);
  };
  int64_t pageable_bytes = -1;
  const auto [expected, copies] = count(mapped, &pageable_bytes);
  CHECK(copies == 0);
  CHECK(pageable_bytes == 0);
  // A card that cannot lock what is mapped for reading.
  cuda_emulation::lock_for_reading(false);
  const auto [tokens, slow_copies] = count(mapped, &pageable_bytes);
  CHECK(tokens == expected);
  CHECK(slow_copies > 0);
  CHECK(pageable_bytes > 0);
  const auto copied_from_it = mapped.with_slices("cpu", "access", "mapped", "resident");
  CHECK(count(copied_from_it, &pageable_bytes) == std::pair(expected, int64_t{0}));
  CHECK(pageable_bytes == 0);
  cuda_emulation::lock_for_reading(true);
}
