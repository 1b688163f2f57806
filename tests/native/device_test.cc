// Every device that this machine has keeps the contract of cpp/device/device.h.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "device/memory.h"
#include "device/registry.h"
#include "engine/stages.h"
#include "tiny_model.h"

namespace {

using helm::Device;
using helm::DeviceAddress;
using helm::Error;
using helm::ErrorKind;

constexpr int64_t kCap = int64_t{64} << 20;

helm::ThreadPool& pool() {
  static helm::ThreadPool threads(2);
  return threads;
}

std::unique_ptr<Device> open(const std::string& name) {
  if (name == "cpu")
    return std::make_unique<helm::cpu::CpuDevice>(helm::cpu::select_kernels(), pool());
  return helm::open_accelerator(name);
}

const std::vector<std::string> kDevices = {"cpu", "sim:vram=64MiB",
                                           "sim:vram=64MiB,link=2GB/s,latency=50us,threads=2"};

std::vector<float> numbers(size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

ErrorKind kind_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.kind();
  }
  FAIL("no error was thrown");
  return ErrorKind::kInvalid;
}

}  // namespace

TEST_CASE("what is uploaded comes back") {
  for (const std::string& name : kDevices) {
    CAPTURE(name);
    const auto device = open(name);
    const auto stream = device->create_stream();
    const std::vector<float> sent = numbers(10007);
    const auto bytes = static_cast<int64_t>(sent.size() * sizeof(float));
    const DeviceAddress address = device->allocate(bytes, "a test");
    CHECK(static_cast<uintptr_t>(address) % 64 == 0);
    std::vector<float> got(sent.size(), 0);
    stream->upload(address, sent.data(), bytes);
    stream->download(got.data(), address, bytes);
    stream->synchronize();
    CHECK(got == sent);
    stream->upload(address + 4, sent.data(), 8);
    stream->download(got.data(), address, 12);
    stream->synchronize();
    CHECK(got[0] == sent[0]);
    CHECK(got[1] == sent[0]);
    CHECK(got[2] == sent[1]);
    device->release(address);
  }
}

TEST_CASE("a refused allocation says what it was for and changes nothing") {
  for (const std::string& name : {kDevices[1], kDevices[2]}) {
    const auto device = open(name);
    CHECK(device->describe().memory_bytes == kCap);
    const DeviceAddress first = device->allocate(kCap - 512, "a test");
    CHECK(device->describe().free_bytes == 512);
    try {
      device->allocate(513, "one byte too many");
      FAIL("no error was thrown");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kMemory);
      CHECK(std::string(error.what()).find("one byte too many") != std::string::npos);
    }
    CHECK(device->describe().free_bytes == 512);
    const DeviceAddress second = device->allocate(512, "a test");
    CHECK(device->describe().free_bytes == 0);
    device->release(second);
    device->release(first);
    CHECK(device->describe().free_bytes == kCap);
  }
}

TEST_CASE("an account refuses the byte beyond its limit and remembers the peak") {
  const auto device = open(kDevices[1]);
  helm::Account account(*device, 1 << 20);
  {
    const helm::DeviceMemory a(account, 1 << 19, "a test");
    helm::DeviceMemory b(account, 1 << 19, "a test");
    CHECK(kind_of([&] { helm::DeviceMemory c(account, 1, "a test"); }) == ErrorKind::kMemory);
    b = helm::DeviceMemory(account, 0, "nothing");
    CHECK(account.used_bytes() == 1 << 19);
  }
  CHECK(account.used_bytes() == 0);
  CHECK(account.peak_bytes() == 1 << 20);
  CHECK(device->describe().free_bytes == kCap);
}

TEST_CASE("an address of the simulated accelerator is no host pointer and is checked") {
  const auto device = open(kDevices[1]);
  const auto stream = device->create_stream();
  const DeviceAddress address = device->allocate(1000, "a test");
  CHECK((static_cast<uintptr_t>(address) >> 47) != 0);
  std::vector<std::byte> host(2048);
  CHECK(kind_of([&] { stream->upload(address, host.data(), 1025); }) == ErrorKind::kInvalid);
  CHECK(kind_of([&] { stream->download(host.data(), address + 1024, 1); }) == ErrorKind::kInvalid);
  CHECK(kind_of([&] { device->release(address + 256); }) == ErrorKind::kInvalid);
  device->release(address);
  CHECK(kind_of([&] { stream->upload(address, host.data(), 1); }) == ErrorKind::kInvalid);
}

TEST_CASE("a stream waits for the event of another") {
  for (const std::string& name : kDevices) {
    CAPTURE(name);
    const auto device = open(name);
    const auto first = device->create_stream();
    const auto second = device->create_stream();
    const auto event = device->create_event();
    const int64_t bytes = 1 << 20;
    helm::StagingMemory sent(*device, bytes, "a test");
    helm::StagingMemory got(*device, bytes, "a test");
    std::memset(sent.data(), 7, static_cast<size_t>(bytes));
    const DeviceAddress address = device->allocate(bytes, "a test");
    event->synchronize();  // never recorded: at once
    for (int round = 1; round < 4; ++round) {
      std::memset(sent.data(), round, static_cast<size_t>(bytes));
      first->upload(address, sent.data(), bytes);
      first->record(*event);
      second->wait(*event);
      second->download(got.data(), address, bytes);
      second->synchronize();
      CHECK(std::memcmp(sent.data(), got.data(), static_cast<size_t>(bytes)) == 0);
    }
    device->release(address);
  }
}

TEST_CASE("copies take the time of the link and leave the host free") {
  using Clock = std::chrono::steady_clock;
  const auto device = open("sim:link=100MB/s,latency=1ms");
  const auto stream = device->create_stream();
  const int64_t bytes = 2'000'000;
  const DeviceAddress address = device->allocate(bytes, "a test");
  const std::vector<std::byte> host(static_cast<size_t>(bytes));
  const auto start = Clock::now();
  stream->upload(address, host.data(), bytes);
  const double enqueued = std::chrono::duration<double>(Clock::now() - start).count();
  stream->synchronize();
  const double done = std::chrono::duration<double>(Clock::now() - start).count();
  CHECK(done >= 0.021);
  CHECK(enqueued < 0.5 * done);
}

TEST_CASE("a stage gives on every device what it gives on the CPU") {
  const auto model = helm::test::tiny_model({.pages = 8});
  const helm::Plan plan = helm::Plan::from_json(model.plan.dump());
  std::vector<float> reference;
  for (const std::string& name : kDevices) {
    CAPTURE(name);
    const auto device = open(name);
    const auto stream = device->create_stream();
    std::vector<DeviceAddress> taken;
    const auto allocate = [&](int64_t bytes) {
      taken.push_back(device->allocate(bytes, "a test"));
      return taken.back();
    };
    helm::StageSpec spec;
    spec.plan = &plan;
    spec.units = plan.units;
    for (const helm::TensorSpec& tensor : plan.tensors) {
      spec.weights.push_back(allocate(tensor.bytes()));
      stream->upload(spec.weights.back(), model.data.at(tensor.name)->data(), tensor.bytes());
    }
    for (const helm::ValueSpec& value : plan.values) {
      spec.values.push_back(allocate(plan.limits.step_tokens * value.width * 4));
    }
    spec.kv = allocate(plan.kv.pages * plan.kv.page_bytes());
    spec.workspace = allocate(device->workspace_bytes(plan, plan.units));
    const auto stage = device->compile(spec);

    std::vector<float> all;
    const std::vector<int32_t> pages = {3, 1, 0, 2};  // [blocks, layers]
    for (int32_t begin = 0; begin < 24; begin += 8) {
      std::vector<int32_t> ids, positions;
      for (int32_t i = begin; i < begin + 8; ++i) {
        ids.push_back((i * 7) % 61);
        positions.push_back(i);
      }
      const std::vector<int32_t> outputs = {1, 7};
      std::vector<helm::SequenceRun> runs = {{0, 8, begin, pages.data()}};
      stage->run(*stream, {ids, positions, outputs, runs});
      // The step's arrays may change as soon as run() has returned.
      std::fill(ids.begin(), ids.end(), 0);
      std::fill(positions.begin(), positions.end(), 0);
      runs[0].pages = nullptr;
      std::vector<float> logits(static_cast<size_t>(2 * plan.vocab_size));
      stream->download(logits.data(), spec.values[static_cast<size_t>(plan.logits)],
                       static_cast<int64_t>(logits.size() * sizeof(float)));
      stream->synchronize();
      all.insert(all.end(), logits.begin(), logits.end());
    }
    if (reference.empty()) reference = all;
    CHECK(all == reference);
    for (const DeviceAddress address : taken) device->release(address);
  }
}

TEST_CASE("a specification that makes no sense is refused by name") {
  for (const char* bad : {"", "gpu", "simulated", "sim:vram", "sim:vram=0", "sim:vram=-1GiB",
                          "sim:vram=2Gibi", "sim:vram=nan", "sim:speed=1", "sim:threads=1.5",
                          "sim:threads=0", "sim:link=fast", "sim:latency=2s", "sim:vram=1e30"}) {
    CAPTURE(bad);
    CHECK(kind_of([&] { helm::open_accelerator(bad); }) == ErrorKind::kInvalid);
  }
}
