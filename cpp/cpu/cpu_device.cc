#include "cpu/cpu_device.h"

#include <unistd.h>

#include <cstring>

#include "cpu/stage.h"
#include "device/lane_clock.h"
#include "device/stage_bytes.h"

namespace helm::cpu {
namespace {

class CpuEvent final : public Event {
 public:
  void synchronize() override {}
};

class CpuStream final : public Stream {
 public:
  void upload(DeviceAddress to, const void* from, int64_t bytes) override {
    std::memcpy(host_pointer(to), from, static_cast<size_t>(bytes));
  }
  void download(void* to, DeviceAddress from, int64_t bytes) override {
    std::memcpy(to, host_pointer(from), static_cast<size_t>(bytes));
  }
  void record(Event&) override {}
  void wait(Event& event) override { event.synchronize(); }
  void synchronize() override {}
};

class PacedStage final : public Stage {
 public:
  PacedStage(const StageSpec& spec, std::unique_ptr<Stage> stage, double bytes_per_s,
             double node_cost)
      : spec_(spec), stage_(std::move(stage)), bytes_per_s_(bytes_per_s), node_cost_(node_cost) {}
  void run(Stream& stream, const StepView& step) override {
    const int64_t bytes = stage_bytes(spec_, step, node_cost_);
    const LaneTime end = later(std::chrono::steady_clock::now(), time_at(bytes_per_s_, bytes));
    stage_->run(stream, step);
    sleep_until(end);
  }

 private:
  const StageSpec spec_;
  std::unique_ptr<Stage> stage_;
  double bytes_per_s_, node_cost_;
};

}  // namespace

DeviceInfo CpuDevice::describe() const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return {"cpu", std::string("CPU, ") + kernels_.name, sysconf(_SC_PHYS_PAGES) * page,
          sysconf(_SC_AVPHYS_PAGES) * page};
}

DeviceAddress CpuDevice::allocate(int64_t bytes, const char* purpose) {
  Arena arena(bytes, purpose);
  std::byte* data = arena.data();
  arenas_.emplace(data, std::move(arena));
  return device_address(data);
}

void CpuDevice::release(DeviceAddress address) {
  arenas_.erase(host_pointer(address));
}

std::byte* CpuDevice::allocate_host(int64_t bytes, const char* purpose) {
  return host_pointer(allocate(bytes, purpose));
}

void CpuDevice::release_host(std::byte* memory) {
  arenas_.erase(memory);
}

std::vector<std::span<const std::byte>> CpuDevice::lazy_memory() const {
  std::vector<std::span<const std::byte>> found;
  for (const auto& [address, arena] : arenas_) found.push_back(arena.memory());
  return found;
}

std::unique_ptr<Stream> CpuDevice::create_stream() {
  return std::make_unique<CpuStream>();
}

std::unique_ptr<Event> CpuDevice::create_event() {
  return std::make_unique<CpuEvent>();
}

bool CpuDevice::takes(const Format& format) const {
  return multiplies(kernels_, format);
}

int64_t CpuDevice::workspace_bytes(const Plan& plan, std::span<const UnitSpec> units) const {
  return CpuStage::workspace_bytes(plan, units, kernels_, threads_.size());
}

std::unique_ptr<Stage> CpuDevice::compile(const StageSpec& spec) {
  auto stage = std::make_unique<CpuStage>(spec, kernels_, threads_, times_, integers_);
  if (paced_bytes_per_s_ <= 0) return stage;
  return std::make_unique<PacedStage>(spec, std::move(stage), paced_bytes_per_s_, node_cost_);
}

}  // namespace helm::cpu
