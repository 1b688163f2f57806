// Weights that visit: page-locked as long as they are needed, whatever fails in between.
#include "engine/block_stream.h"

#include <doctest/doctest.h>

#include <vector>

#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "engine/weights.h"
#include "tiny_model.h"

namespace {

// The CPU, with a count of what is page-locked, that creates so many events.
class Counting final : public helm::Device {
 public:
  explicit Counting(helm::Device& cpu) : cpu_(cpu) {}

  helm::DeviceInfo describe() const override { return cpu_.describe(); }
  helm::DeviceAddress allocate(int64_t bytes, const char* purpose) override {
    return cpu_.allocate(bytes, purpose);
  }
  void release(helm::DeviceAddress address) override { cpu_.release(address); }
  std::byte* allocate_host(int64_t bytes, const char* purpose) override {
    return cpu_.allocate_host(bytes, purpose);
  }
  void release_host(std::byte* memory) override { cpu_.release_host(memory); }
  bool pin(const void*, int64_t) override {
    ++pins;
    ++pinned;
    return true;
  }
  void unpin(const void*) override { --pinned; }
  std::unique_ptr<helm::Stream> create_stream() override { return cpu_.create_stream(); }
  std::unique_ptr<helm::Event> create_event() override {
    if (events-- == 0) throw helm::Error(helm::ErrorKind::kDevice, "no event");
    return cpu_.create_event();
  }
  int64_t workspace_bytes(const helm::Plan& plan,
                          std::span<const helm::UnitSpec> units) const override {
    return cpu_.workspace_bytes(plan, units);
  }
  std::unique_ptr<helm::Stage> compile(const helm::StageSpec& spec) override {
    return cpu_.compile(spec);
  }

  int pins = 0;
  int pinned = 0;
  int events = 0;

 private:
  helm::Device& cpu_;
};

}  // namespace

TEST_CASE("visiting weights are page-locked no longer than they visit") {
  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  shape.stream_tokens = 8;
  shape.stream_pages = 20;
  shape.weight_dtype = "f16";  // copied, not used where they lie
  const helm::test::TinyModel model = helm::test::tiny_model(shape);
  const helm::Plan plan = helm::Plan::from_json(model.plan);
  const helm::cpu::KernelTable& kernels = helm::cpu::select_kernels();
  helm::ThreadPool threads(1);
  helm::cpu::CpuDevice cpu(kernels, threads);
  Counting device(cpu);
  helm::Account account(device, int64_t{1} << 30);
  helm::EngineOptions options = model.options();
  device.events = 100;
  const helm::Weights weights(plan, options, kernels, threads, &account);
  std::vector<std::byte> workspace(static_cast<size_t>(device.workspace_bytes(plan, plan.units)) +
                                   4096);
  helm::StageSpec bound;
  bound.plan = &plan;
  bound.values.assign(plan.values.size(), helm::DeviceAddress::kNull);
  bound.workspace = helm::cpu::device_address(workspace.data());
  int refused = 0;
  for (bool whole = false; !whole; ++refused) {
    REQUIRE(refused < 10);
    device.events = refused;
    try {
      const helm::BlockStream blocks(plan, weights, bound, nullptr, account);
      whole = true;
    } catch (const helm::Error& error) {
      CHECK(error.kind() == helm::ErrorKind::kDevice);
    }
    CHECK(device.pinned == 0);
  }
  CHECK(refused > 1);
  CHECK(device.pins > 0);
}
