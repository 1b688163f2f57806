#include "device_conformance.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "device/memory.h"
#include "oracle.h"
#include "plan_oracle.h"
#include "support/check.h"

namespace helm::test {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// Of a tensor of a model that lies on the CPU.
Format held_format(const Plan& plan, size_t tensor) {
  return plan.slice(static_cast<TensorIndex>(tensor), false)->format;
}

// The next tokens of one sequence in a step; the logits of the last are wanted.
struct Input {
  int sequence;
  std::vector<int32_t> tokens;
};
using Step = std::vector<Input>;

int32_t token_at(int sequence, int64_t position) {
  return static_cast<int32_t>((position * position * 7 + position * 13 + sequence * 29 + 3) % 61);
}

// Prompts in chunks above and below the sizes where kernels change, decode steps repeated so often
// that what a device caches by shape is used again, and prompts that join decoding sequences.
std::vector<Step> script() {
  std::vector<Step> steps;
  std::vector<int64_t> lengths(4, 0);
  const auto input = [&](int sequence, int64_t count) {
    Input in{sequence, {}};
    int64_t& length = lengths[static_cast<size_t>(sequence)];
    for (int64_t i = 0; i < count; ++i) in.tokens.push_back(token_at(sequence, length++));
    return in;
  };
  const auto decode = [&](const std::vector<int>& sequences, int count) {
    for (int i = 0; i < count; ++i) {
      Step step;
      for (const int sequence : sequences) step.push_back(input(sequence, 1));
      steps.push_back(std::move(step));
    }
  };
  steps.push_back({input(0, 13)});
  steps.push_back({input(0, 5)});
  decode({0}, 4);
  steps.push_back({input(0, 1), input(1, 30)});
  decode({1, 0}, 4);
  steps.push_back({input(2, 9), input(1, 1), input(0, 1)});
  decode({0, 1, 2}, 4);
  for (int i = 0; i < 3; ++i) steps.push_back({input(3, 31)});
  decode({3, 0, 1, 2}, 4);
  decode({3}, 4);
  return steps;
}

std::vector<float> rounded(DType dtype, const std::vector<float>& values) {
  const std::vector<unsigned char> bytes = encode(dtype, values);
  std::vector<float> out;
  for (size_t i = 0; i < values.size(); ++i) {
    out.push_back(static_cast<float>(decode(dtype, bytes.data(), static_cast<int64_t>(i))));
  }
  return out;
}

// A small model on a device as one stage, with its pages handed out in scattered order.
class StageRunner {
 public:
  StageRunner(Device& device, const TinyModel& model)
      : account_(device, kUnlimited),
        plan_(Plan::from_json(model.plan)),
        stream_(device.create_stream()),
        kv_(account_, plan_.kv.pages() * plan_.kv.kv_heads * plan_.kv.unit_bytes(), "the KV cache"),
        workspace_(account_, device.workspace_bytes(plan_, plan_.units), "the workspace"),
        free_pages_(static_cast<size_t>(plan_.kv.pages())) {
    StageSpec spec;
    spec.plan = &plan_;
    spec.units = plan_.units;
    spec.kv.assign(plan_.kv.layers.size(), kv_.address());
    spec.workspace = workspace_.address();
    for (const TensorSpec& tensor : plan_.tensors) {
      const Format format = held_format(plan_, spec.weights.size());
      const std::vector<float> data = data_of(model, tensor);
      spec.weights.push_back({place(encode(dtype_of(format), data)), format});
    }
    for (const ValueSpec& value : plan_.values) {
      const int64_t rows = value.per_output ? plan_.limits.step_outputs : plan_.limits.step_tokens;
      spec.values.push_back(hold(rows * value.width * 4));
    }
    logits_ = spec.values[static_cast<size_t>(plan_.logits)];
    std::iota(free_pages_.begin(), free_pages_.end(), 0);
    std::ranges::shuffle(free_pages_, std::mt19937(5));
    for (int32_t& page : free_pages_) page *= static_cast<int32_t>(plan_.kv.kv_heads);
    stage_ = device.compile(spec);
  }

  const Plan& plan() const { return plan_; }

  // Enqueues all steps, then waits once; logits rows of each step one after the other.
  std::vector<std::vector<float>> run(const std::vector<Step>& steps) {
    int64_t rows = 0;
    for (const Step& step : steps) rows += static_cast<int64_t>(step.size());
    const StagingMemory host(account_, account_.device(), rows * plan_.vocab_size * 4, "logits");
    const auto* const begin = reinterpret_cast<const float*>(host.data());
    auto* to = reinterpret_cast<float*>(host.data());
    for (const Step& step : steps) {
      enqueue(step, to);
      to += static_cast<int64_t>(step.size()) * plan_.vocab_size;
    }
    stream_->synchronize();
    std::vector<std::vector<float>> logits;
    for (const float* row = begin; row != to; row += plan_.vocab_size) {
      logits.emplace_back(row, row + plan_.vocab_size);
    }
    return logits;
  }

 private:
  struct Sequence {
    int64_t length = 0;
    std::vector<int32_t> pages;  // [blocks, KV entries], first units
  };

  DeviceAddress hold(int64_t bytes) {
    held_.emplace_back(account_, bytes, "weights and values");
    return held_.back().address();
  }
  DeviceAddress place(const std::vector<unsigned char>& bytes) {
    const auto size = static_cast<int64_t>(bytes.size());
    const DeviceAddress address = hold(size);
    stream_->upload(address, bytes.data(), size);
    stream_->synchronize();
    return address;
  }

  void enqueue(const Step& step, float* to) {
    std::vector<int32_t> ids;
    std::vector<int32_t> positions;
    std::vector<int32_t> outputs;
    std::vector<SequenceRun> runs;
    for (const Input& input : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(input.sequence)];
      const auto count = static_cast<int64_t>(input.tokens.size());
      const auto first_row = static_cast<int64_t>(ids.size());
      grow(sequence, sequence.length + count);
      for (int64_t i = 0; i < count; ++i) {
        ids.push_back(input.tokens[static_cast<size_t>(i)]);
        positions.push_back(static_cast<int32_t>(sequence.length + i));
      }
      runs.push_back({first_row, count, sequence.length, sequence.pages.data()});
      outputs.push_back(static_cast<int32_t>(ids.size()) - 1);
      sequence.length += count;
    }
    stage_->run(*stream_, {ids, positions, outputs, runs});
    stream_->download(to, logits_, static_cast<int64_t>(outputs.size()) * plan_.vocab_size * 4);
    // The step may change once run() has returned.
    for (auto* table : {&ids, &positions, &outputs}) std::ranges::fill(*table, -1);
    std::ranges::fill(runs, SequenceRun{-1, -1, -1, nullptr});
  }

  void grow(Sequence& sequence, int64_t length) {
    const int64_t blocks = (length + plan_.kv.page_tokens - 1) / plan_.kv.page_tokens;
    while (static_cast<int64_t>(sequence.pages.size()) < blocks * plan_.kv.entries()) {
      REQUIRE(!free_pages_.empty());
      sequence.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
  }

  Account account_;
  Plan plan_;
  std::unique_ptr<Stream> stream_;
  DeviceMemory kv_;
  DeviceMemory workspace_;
  std::vector<DeviceMemory> held_;
  std::vector<int32_t> free_pages_;
  Sequence sequences_[4];
  DeviceAddress logits_{};
  std::unique_ptr<Stage> stage_;  // last: destroyed before its buffers
};

// Allowed |error| relative to the largest logit of the row. A chain of `depth` sums of at most
// `longest` terms rounds each term once in f32; narrowed inputs and cached K and V, which may fall
// to the other side of a rounding than the oracle's, each add a unit roundoff of their dtype.
double relative_bound(const Plan& plan, const StageCase& test) {
  const auto layers = static_cast<double>(plan.kv.model_layers());
  const auto unit = [](const std::string& dtype) {
    if (dtype == "f32") return 0.0;
    return std::ldexp(1.0, dtype == "f16" ? -11 : dtype == "bf16" ? -8 : -7);
  };
  int64_t longest = plan.limits.context;
  for (const ValueSpec& value : plan.values) longest = std::max(longest, value.width);
  const double depth = 6 * layers + 1;
  const double narrowings = test.narrows_inputs ? 4 * layers : 0;
  return depth * static_cast<double>(longest) * std::ldexp(1.0, -24) +
         narrowings * unit(test.shape.weight_dtype) + 4 * layers * unit(test.shape.kv_dtype);
}

}  // namespace

void conform_allocation(const DeviceFactory& open) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const auto device = open(8 * kMiB);
  const int64_t free_bytes = device->describe().free_bytes;
  REQUIRE(free_bytes == 8 * kMiB);
  const DeviceAddress first = device->allocate(5 * kMiB, "the first part");
  CHECK(static_cast<uintptr_t>(first) % 256 == 0);
  CHECK(device->describe().free_bytes == 3 * kMiB);
  for (const int64_t bytes : {3 * kMiB + 1, int64_t{1} << 50}) {
    try {
      device->allocate(bytes, "the second part");
      FAIL("the allocation should have been refused");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kMemory);
      CHECK(std::string(error.what()).find("the second part") != std::string::npos);
    }
    CHECK(device->describe().free_bytes == 3 * kMiB);
  }
  const DeviceAddress second =
      device->allocate(3 * kMiB, "the rest");  // as if nothing had happened
  CHECK(device->describe().free_bytes == 0);
  device->release(first);
  device->release(second);
  CHECK(device->describe().free_bytes == free_bytes);
  for (const int64_t bytes : {0, 1, 255, 257}) {
    const DeviceAddress odd = device->allocate(bytes, "an odd size");
    CHECK(odd != DeviceAddress::kNull);
    CHECK(static_cast<uintptr_t>(odd) % 256 == 0);
    device->release(odd);
  }
  CHECK(device->describe().free_bytes == free_bytes);
}

void conform_copies(const DeviceFactory& open) {
  const auto device = open(0);
  Account account(*device, kUnlimited);
  const auto stream = device->create_stream();
  std::mt19937 random(11);
  for (const int64_t bytes : {1, 3, 255, 4097, 1 << 20}) {
    const DeviceMemory memory(account, bytes + 16, "a test");
    const StagingMemory from(account, *device, bytes, "a test");
    const StagingMemory to(account, *device, bytes, "a test");
    for (int64_t i = 0; i < bytes; ++i) from.data()[i] = static_cast<std::byte>(random());
    std::memset(to.data(), 0x5a, static_cast<size_t>(bytes));
    for (const int64_t offset : {0, 7}) {
      stream->upload(memory.address() + offset, from.data(), bytes);
      stream->download(to.data(), memory.address() + offset, bytes);
      stream->synchronize();
      CHECK(std::memcmp(from.data(), to.data(), static_cast<size_t>(bytes)) == 0);
    }
    // Memory that is not page-locked, and reused at once, as loaders do.
    std::vector<std::byte> plain(from.data(), from.data() + bytes);
    stream->upload(memory.address(), plain.data(), bytes);
    stream->synchronize();
    std::ranges::fill(plain, std::byte{0});
    const bool pinned = device->pin(plain.data(), bytes, true);
    stream->download(plain.data(), memory.address(), bytes);
    stream->synchronize();
    if (pinned) device->unpin(plain.data());
    CHECK(std::memcmp(from.data(), plain.data(), static_cast<size_t>(bytes)) == 0);
  }
}

void conform_ordering(const DeviceFactory& open) {
  const auto device = open(0);
  constexpr int64_t kCount = 1 << 18;
  constexpr int64_t kBytes = kCount * 4;
  Account account(*device, kUnlimited);
  const DeviceMemory memory(account, kBytes, "a test");
  const DeviceMemory other(account, kBytes, "a test");
  const StagingMemory from(account, *device, kBytes, "a test");
  const StagingMemory to(account, *device, kBytes, "a test");
  auto* const sent = reinterpret_cast<int32_t*>(from.data());
  const auto* const got = reinterpret_cast<const int32_t*>(to.data());
  const auto writer = device->create_stream();
  const auto reader = device->create_stream();
  const auto written = device->create_event();
  const auto read = device->create_event();
  written->synchronize();  // never recorded: at once
  reader->wait(*written);  // likewise
  for (int32_t round = 0; round < 20; ++round) {
    std::fill_n(sent, kCount, round);
    writer->wait(*read);  // of the round before
    for (int i = 0; i < 3; ++i) writer->upload(memory.address(), from.data(), kBytes);
    writer->record(*written);
    reader->wait(*written);
    reader->download(to.data(), memory.address(), kBytes);
    reader->record(*read);
    read->synchronize();
    CHECK(got[0] == round);
    CHECK(got[kCount - 1] == round);
  }
  // A stream with work of its own does not hold up the other.
  for (int i = 0; i < 20; ++i) writer->upload(memory.address(), from.data(), kBytes);
  reader->upload(other.address(), from.data(), 64);
  reader->synchronize();
  writer->synchronize();
}

void conform_formats(const DeviceFactory& open) {
  const auto device = open(0);
  const Plan plan = Plan::from_json(tiny_model({}).plan);
  for (const FormatRow& row : kFormats) {
    CAPTURE(row.name);
    if (is_dense(row.format)) CHECK(device->takes(row.format));
    if (device->takes(row.format)) continue;
    StageSpec spec;
    spec.plan = &plan;
    spec.units = std::span(plan.units).first(1);
    spec.weights.assign(plan.tensors.size(), {DeviceAddress::kNull, row.format});
    spec.values.resize(plan.values.size());
    try {
      device->compile(spec);
      FAIL("the format should have been refused");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kInvalid);
      const std::string named = std::string("format ") + row.name + ";";
      CHECK(std::string(error.what()).find(named) != std::string::npos);
    }
  }
}

std::vector<std::vector<float>> stage_logits(const DeviceFactory& open, const TinyShape& shape) {
  const auto device = open(0);
  return StageRunner(*device, tiny_model(shape)).run(script());
}

void conform_stage(const DeviceFactory& open, const StageCase& test) {
  const TinyModel model = tiny_model(test.shape);
  constexpr int64_t kLimit = int64_t{256} << 20;
  const auto device = open(kLimit);
  const bool limited = device->describe().free_bytes == kLimit;  // the CPU's memory is everyone's
  {
    StageRunner runner(*device, model);
    const std::vector<Step> steps = script();
    const std::vector<std::vector<float>> logits = runner.run(steps);

    const Plan& plan = runner.plan();
    std::vector<std::vector<float>> weights;
    for (const TensorSpec& tensor : plan.tensors) {
      const DType dtype = dtype_of(held_format(plan, weights.size()));
      weights.push_back(rounded(dtype, data_of(model, tensor)));
    }
    PlanOracle oracle(plan, std::move(weights));
    const double relative = relative_bound(plan, test);
    size_t row = 0;
    for (size_t s = 0; s < steps.size(); ++s) {
      for (const Input& input : steps[s]) {
        Row want;
        for (const int32_t token : input.tokens) want = oracle.next(input.sequence, token);
        double most = 0;
        for (const double x : want) most = std::max(most, std::abs(x));
        CHECK_EQ(
            compare(logits[row++], want, std::vector<double>(want.size(), relative * most),
                    "step " + std::to_string(s) + ", sequence " + std::to_string(input.sequence)),
            "");
      }
    }
  }
  if (limited) CHECK(device->describe().free_bytes == kLimit);
}

}  // namespace helm::test
