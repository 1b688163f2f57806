// Time as the simulated accelerator spends it: its link, its memory, and the CPU's beside it.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/registry.h"
#include "device/stage_bytes.h"
#include "helm/engine.h"
#include "support/this_build.h"
#include "tiny_model.h"

namespace {

using helm::Plan;
using helm::SequenceRun;
using helm::StageSpec;
using helm::StepInput;
using helm::StepView;
using helm::test::kSanitized;
using helm::test::tiny_model;
using helm::test::TinyModel;
using helm::test::TinyShape;
using helm::test::token_ids;
using Clock = std::chrono::steady_clock;

const int kTries = kSanitized ? 1 : 10;  // until nothing else has kept the CPU busy

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The time of `work`, which may never take less than `least` seconds, and once no more than `most`.
template <typename Work>
void check_time(double least, double most, const Work& work) {
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < kTries && best > most; ++i) {
    const Clock::time_point start = Clock::now();
    work();
    const double spent = since(start);
    CHECK(spent >= least);
    best = std::min(best, spent);
  }
  CHECK((kSanitized || best <= most));  // sanitizers make copies slower than any link
}

// A device with memory and two streams.
struct Copies {
  explicit Copies(const std::string& name)
      : device(helm::open_accelerator(name)),
        first(device->create_stream()),
        second(device->create_stream()),
        there(device->allocate(2 * kBytes, "a test")),
        here(static_cast<size_t>(2 * kBytes)) {}

  void upload(helm::Stream& stream, int64_t at, int64_t bytes) {
    stream.upload(there + at, here.data() + at, bytes);
  }
  void download(helm::Stream& stream, int64_t at, int64_t bytes) {
    stream.download(here.data() + at, there + at, bytes);
  }
  void await() const {
    first->synchronize();
    second->synchronize();
  }

  static constexpr int64_t kBytes = int64_t{10} << 20;
  std::unique_ptr<helm::Device> device;
  std::unique_ptr<helm::Stream> first, second;
  helm::DeviceAddress there;
  std::vector<std::byte> here;
};

constexpr double kRate = 100e6;
constexpr double kOne_s = static_cast<double>(Copies::kBytes) / kRate;

}  // namespace

TEST_CASE("streams share a direction of the link, and its two directions share nothing") {
  Copies copies("sim:link=100MB/s");
  check_time(2 * kOne_s, 1.15 * 2 * kOne_s, [&] {
    copies.upload(*copies.first, 0, Copies::kBytes);
    copies.upload(*copies.second, Copies::kBytes, Copies::kBytes);
    copies.await();
  });
  check_time(2 * kOne_s, 1.15 * 2 * kOne_s, [&] {
    copies.download(*copies.first, 0, Copies::kBytes);
    copies.download(*copies.second, Copies::kBytes, Copies::kBytes);
    copies.await();
  });
  check_time(kOne_s, 1.15 * kOne_s, [&] {
    copies.upload(*copies.first, 0, Copies::kBytes);
    copies.download(*copies.second, Copies::kBytes, Copies::kBytes);
    copies.await();
  });
}

TEST_CASE("a short copy goes between the pieces of a long one") {
  Copies copies("sim:link=100MB/s");
  const double piece_s = static_cast<double>(1 << 20) / kRate;
  double best = kOne_s;
  for (int i = 0; i < kTries && best > 0.5 * kOne_s; ++i) {
    const Clock::time_point start = Clock::now();
    copies.upload(*copies.first, 0, Copies::kBytes);
    copies.upload(*copies.second, Copies::kBytes, 1 << 20);
    copies.second->synchronize();
    const double spent = since(start);
    CHECK(spent >= piece_s);
    best = std::min(best, spent);
    copies.first->synchronize();
  }
  CHECK((kSanitized || best <= 0.5 * kOne_s));
}

TEST_CASE("each copy has its latency, and many short ones add up to no more") {
  Copies copies("sim:link=100MB/s,latency=1ms");
  const double least = 60 * (1e-3 + 5e4 / kRate);
  check_time(least, 1.15 * least, [&] {
    for (int i = 0; i < 30; ++i) {
      copies.upload(*copies.first, 0, 50'000);
      copies.upload(*copies.second, Copies::kBytes, 50'000);
    }
    copies.await();
  });
}

TEST_CASE("a stream that waits for another goes on when that one's work would have ended") {
  Copies copies("sim:link=100MB/s");
  const auto up = copies.device->create_event();
  const auto down = copies.device->create_event();
  const int64_t bytes = 100'000;  // 1 ms
  const double least = 2 * 50 * static_cast<double>(bytes) / kRate;
  check_time(least, 1.15 * least, [&] {
    for (int i = 0; i < 50; ++i) {
      copies.first->wait(*down);
      copies.upload(*copies.first, 0, bytes);
      copies.first->record(*up);
      copies.second->wait(*up);
      copies.download(*copies.second, 0, bytes);
      copies.second->record(*down);
    }
    copies.await();
  });
}

namespace {

// What a unit of a tiny model reads, from the model's shape alone; f32, without biases.
struct Reads {
  const TinyShape& shape;

  int64_t block(int64_t tokens, int64_t outputs, int64_t positions, bool last) const {
    const int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    int64_t elements = shape.hidden + (q + 2 * kv) * shape.hidden + 2 * kv * positions;
    if (!last || outputs > 0) {
      elements += shape.hidden * q + shape.hidden + 3 * shape.inter * shape.hidden;
    }
    return tokens > 0 ? 4 * elements : 0;
  }
  int64_t head(int64_t outputs) const {
    return outputs > 0 ? 4 * (shape.hidden + shape.vocab * shape.hidden) : 0;
  }
  int64_t embedding(int64_t tokens) const { return 4 * tokens * shape.hidden; }
};

StageSpec spec_of(const Plan& plan, size_t begin, size_t end) {
  StageSpec spec;
  spec.plan = &plan;
  spec.units = std::span(plan.units).subspan(begin, end - begin);
  spec.weights.resize(plan.tensors.size());
  for (const helm::SliceSpec& slice : plan.slices) {
    spec.weights[static_cast<size_t>(slice.tensor)].format = slice.format;
  }
  return spec;
}

}  // namespace

TEST_CASE("the bytes of a stage are its weights, rows of tables, and the positions it sees") {
  TinyShape shape;
  const Plan plan = Plan::from_json(tiny_model(shape).plan);
  const Reads reads{shape};
  const StageSpec all = spec_of(plan, 0, 6);
  const std::vector<int32_t> ids(5), rows(2);
  const std::vector<SequenceRun> runs{{0, 1, 70, nullptr}, {1, 4, 0, nullptr}};  // see 71 and 4
  CHECK(helm::stage_bytes(all, {ids, ids, rows, runs}) ==
        reads.embedding(5) + reads.block(5, 2, 75, false) + reads.block(5, 2, 75, true) +
            reads.head(2));
  CHECK(helm::stage_bytes(all, {ids, ids, {}, runs}) ==
        reads.embedding(5) + reads.block(5, 0, 75, false) + reads.block(5, 0, 75, true));
  CHECK(helm::stage_bytes(spec_of(plan, 1, 3), {ids, ids, rows, runs}) ==
        reads.block(5, 2, 75, false));
  CHECK(helm::stage_bytes(spec_of(plan, 5, 6), {ids, ids, {}, runs}) == 0);
  // Of pages of 16: blocks 1 to 3, and from block 4 on.
  const std::vector<SequenceRun> middle{{0, 1, 70, nullptr, 1, 4}}, rest{{0, 1, 70, nullptr, 4}};
  CHECK(helm::stage_bytes(spec_of(plan, 1, 3), {ids, ids, rows, middle}) ==
        reads.block(5, 2, 48, false));
  CHECK(helm::stage_bytes(spec_of(plan, 1, 3), {ids, ids, rows, rest}) ==
        reads.block(5, 2, 7, false));

  shape.window = 20;  // the second run sees 35 + 4 - (35 + 1 - 20) positions
  const Plan windowed = Plan::from_json(tiny_model(shape).plan);
  const std::vector<SequenceRun> later{{0, 1, 70, nullptr}, {1, 4, 35, nullptr}};
  CHECK(helm::stage_bytes(spec_of(windowed, 1, 3), {ids, ids, rows, later}) ==
        reads.block(5, 2, 20 + 23, false));

  TinyShape mixed;  // half of the experts for each token
  mixed.experts = 4;
  const Plan mixture = Plan::from_json(tiny_model(mixed).plan);
  const StageSpec mlp = spec_of(mixture, 2, 3);
  const std::vector<int32_t> one(1), two(2);
  const auto of = [&](const std::vector<int32_t>& tokens) {
    return helm::stage_bytes(mlp, {tokens, tokens, {}, runs});
  };
  CHECK(of(two) - of(one) == 4 * 3 * mixed.inter * mixed.hidden);  // 3 of 4, and 2

  shape.window = 0;
  shape.kv_dtype = "i8";  // a byte each, and a scale per position and head
  shape.weight_dtype = "f16";
  const Plan small = Plan::from_json(tiny_model(shape).plan);
  const int64_t f32 = reads.block(5, 2, 0, false), vectors = 4 * 2 * shape.hidden;
  CHECK(helm::stage_bytes(spec_of(small, 1, 3), {ids, ids, rows, runs}) ==
        vectors + (f32 - vectors) / 2 + 75 * 2 * shape.kv_heads * (shape.head_dim + 4));
}

TEST_CASE("paced devices take what their stages read over the rate, and compute the same") {
  constexpr int64_t kPrompt = 30, kSteps = 4;
  constexpr double kCpu = 1e6, kAccelerator = 2e6;
  TinyShape shape;
  shape.layers = 3;
  shape.devices = {"cpu", "cpu", "accelerator", "accelerator", "cpu"};
  shape.pages = 39;
  shape.accelerator_pages = 26;
  const TinyModel model = tiny_model(shape);
  const auto logits_of = [&](helm::Engine& engine) {
    std::vector<float> all;
    const auto keep = [&](std::span<const float> row) {
      all.insert(all.end(), row.begin(), row.end());
    };
    const auto sequence = engine.open(100);
    const auto ids = token_ids(kPrompt + kSteps, 1);
    engine.forward(sequence, std::span(ids).first(kPrompt), StepInput::Outputs::kLast, keep);
    for (int64_t i = 0; i < kSteps; ++i) {
      engine.forward(sequence, std::span(ids).subspan(kPrompt + i, 1), StepInput::Outputs::kLast,
                     keep);
    }
    engine.close(sequence);
    return all;
  };
  const auto expected = logits_of(*helm::test::tiny_engine(model));
  helm::EngineOptions options = model.options();
  options.device = "sim:memory=2MB/s";
  options.pace.cpu_bytes_per_s = kCpu;
  helm::Engine engine(Plan::from_json(model.plan), options);
  const Reads reads{shape};
  double seconds = 0;
  for (int64_t i = 0; i <= kSteps; ++i) {
    const int64_t tokens = i == 0 ? kPrompt : 1, positions = kPrompt + i;
    const int64_t cpu =
        reads.embedding(tokens) + reads.block(tokens, 1, positions, false) + reads.head(1);
    const int64_t own =
        reads.block(tokens, 1, positions, false) + reads.block(tokens, 1, positions, true);
    seconds += static_cast<double>(cpu) / kCpu + static_cast<double>(own) / kAccelerator;
  }
  check_time(seconds, 1.5 * seconds, [&] { CHECK(logits_of(engine) == expected); });
  for (const double bad :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    using Pace = helm::EngineOptions::Pace;
    for (double Pace::* const rate :
         {&Pace::cpu_bytes_per_s, &Pace::node_bytes_per_s, &Pace::disk_bytes_per_s}) {
      options.pace = {};
      options.pace.*rate = bad;
      try {
        helm::Engine refused(Plan::from_json(model.plan), options);
        FAIL("no error was thrown");
      } catch (const helm::Error& error) {
        CHECK(error.kind() == helm::ErrorKind::kInvalid);
      }
    }
  }
}
