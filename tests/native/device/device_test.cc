// Every device that this machine has keeps the contract of cpp/device/device.h.
#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "device/memory.h"
#include "device/registry.h"
#include "device_conformance.h"

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

helm::test::DeviceFactory opener(const std::string& name) {
  return [name](int64_t) { return open(name); };
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

TEST_CASE("page-locked memory is taken from the account of the host's") {
  const auto host = open("cpu");
  const auto device = open(kDevices[1]);
  helm::Account account(*host, 1000);
  {
    helm::StagingMemory kept(account, *device, 600, "a test");
    CHECK(account.used_bytes() == 600);
    CHECK(kind_of([&] { helm::StagingMemory(account, *device, 401, "a test"); }) ==
          ErrorKind::kMemory);
    const auto refusing = open("sim:refuse=1");
    CHECK(kind_of([&] { helm::StagingMemory(account, *refusing, 400, "a test"); }) ==
          ErrorKind::kMemory);
    CHECK(account.used_bytes() == 600);
    kept = helm::StagingMemory(account, *device, 400, "a test");
    CHECK(account.used_bytes() == 400);
  }
  CHECK(account.used_bytes() == 0);
  CHECK(account.peak_bytes() == 1000);
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

TEST_CASE("every device keeps the contract") {
  // The simulated device computes with the CPU's kernels.
  const helm::DType inputs =
      helm::cpu::select_kernels().activations[static_cast<int>(helm::DType::kBF16)];
  const bool narrows = inputs == helm::DType::kBF16;
  for (const std::string& name : kDevices) {
    CAPTURE(name);
    helm::test::conform_copies(opener(name));
    helm::test::conform_ordering(opener(name));
    helm::test::conform_formats(opener(name));
    helm::test::conform_stage(opener(name), {.shape = {}});
    helm::test::conform_stage(opener(name), {.shape = {.kv_dtype = "f16", .weight_dtype = "bf16"},
                                             .narrows_inputs = narrows});
    helm::test::conform_stage(opener(name), {.shape = {.varied = true, .softcap = 4}});
    helm::test::conform_stage(
        opener(name),
        {.shape = {.kv_dtype = "i8", .qkv_bias = true, .varied = true, .softcap = 4}});
    helm::test::conform_stage(opener(name), {.shape = {.experts = 6}});
    helm::test::conform_stage(
        opener(name), {.shape = {.experts = 5, .experts_layout = "halves", .score = "sigmoid"}});
    helm::test::conform_stage(opener(name), {.shape = {.weight_dtype = "bf16",
                                                       .experts = 7,
                                                       .experts_layout = "neighbours",
                                                       .score = "softmax_selected"},
                                             .narrows_inputs = narrows});
    helm::test::conform_attention_pieces(opener(name), {});
    helm::test::conform_attention_pieces(opener(name), {.softcap = 1.5F});
    helm::test::conform_attention_pieces(
        opener(name), {.page_tokens = 5, .window = 37, .kv_dtype = "bf16"}, inputs);
    helm::test::conform_stage(opener(name), {.shape = {.kv_dtype = "i8"}});
    helm::test::conform_stage(opener(name), {.shape = helm::test::cut_shape()});
  }
  helm::test::conform_allocation([](int64_t limit_bytes) {
    return helm::open_accelerator("sim:vram=" + std::to_string(limit_bytes));
  });
}

TEST_CASE("a stage gives on every device what it gives on the CPU, to the bit") {
  const auto reference = helm::test::stage_logits(opener(kDevices[0]), {});
  for (const std::string& name : kDevices) {
    CAPTURE(name);
    CHECK(helm::test::stage_logits(opener(name), {}) == reference);
  }
}

TEST_CASE("a stage gives the same with every part of its team, to the bit") {
  const auto logits = [](int active, const helm::test::TinyShape& shape) {
    helm::ThreadPool threads(3);
    threads.resize(active);
    const auto device = [&](int64_t) {
      return std::make_unique<helm::cpu::CpuDevice>(helm::cpu::select_kernels(), threads);
    };
    return helm::test::stage_logits(device, shape);
  };
  for (const char* dtype : {"f32", "bf16"}) {
    const helm::test::TinyShape shape{.kv_dtype = dtype, .weight_dtype = dtype};
    const auto all = logits(3, shape);
    CHECK(logits(2, shape) == all);
    CHECK(logits(1, shape) == all);
  }
}

TEST_CASE("a specification that makes no sense is refused by name") {
  for (const char* bad : {"",
                          "gpu",
                          "simulated",
                          "sim:vram",
                          "sim:vram=0",
                          "sim:vram=-1GiB",
                          "sim:vram=2Gibi",
                          "sim:vram=nan",
                          "sim:speed=1",
                          "sim:threads=1.5",
                          "sim:threads=0",
                          "sim:link=fast",
                          "sim:latency=2s",
                          "sim:vram=1e30",
                          "sim:memory",
                          "sim:memory=0",
                          "sim:memory=2GB/h",
                          "sim:jitter=2s",
                          "sim:refuse=0",
                          "sim:lost=1.5"}) {
    CAPTURE(bad);
    CHECK(kind_of([&] { helm::open_accelerator(bad); }) == ErrorKind::kInvalid);
  }
}
