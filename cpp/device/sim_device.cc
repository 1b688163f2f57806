#include "device/sim_device.h"

#include "base/check.h"
#include "device/formats.h"
#include "device/sim_stream.h"

namespace helm {
namespace {

// No user-space address of x86-64 or arm64: dereferencing one faults.
constexpr uintptr_t kFirstAddress = uintptr_t{0x5157} << 48;

class SimStage final : public Stage {
 public:
  SimStage(const StageSpec& spec, const cpu::KernelTable& kernels, ThreadPool& threads)
      : stage_(spec, kernels, threads), spec_(spec) {}
  void run(Stream& stream, const StepView& step) override {
    static_cast<SimStream&>(stream).run(stage_, spec_, step);
  }

 private:
  cpu::CpuStage stage_;
  const StageSpec spec_;
};

}  // namespace

SimDevice::SimDevice(const SimOptions& options, const cpu::KernelTable& kernels)
    : options_(options), kernels_(kernels), threads_(options.threads), next_(kFirstAddress) {}

SimDevice::~SimDevice() = default;

DeviceInfo SimDevice::describe() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {"sim", "simulated accelerator", options_.memory_bytes,
          options_.memory_bytes - used_bytes_, true};
}

void SimDevice::begin_command() {
  if (options_.lost_at_command > 0 && ++commands_ >= options_.lost_at_command) {
    fail(ErrorKind::kDevice, "[sim] the simulated accelerator was lost at command ",
         options_.lost_at_command, " (option lost)");
  }
}

void SimDevice::begin_allocation(int64_t bytes, const char* purpose) {
  if (++allocations_ == options_.refused_allocation) {
    fail(ErrorKind::kMemory, "[sim] ", purpose, " needs ", bytes, " bytes; allocation ",
         options_.refused_allocation, " is refused (option refuse)");
  }
}

DeviceAddress SimDevice::allocate(int64_t bytes, const char* purpose) {
  const int64_t rounded = align_up(std::max<int64_t>(bytes, 1), kDeviceAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  begin_allocation(bytes, purpose);
  if (rounded > options_.memory_bytes - used_bytes_) {
    fail(ErrorKind::kMemory, "[sim] ", purpose, " needs ", bytes, " bytes, ",
         options_.memory_bytes - used_bytes_, " of ", options_.memory_bytes,
         " are free on the simulated accelerator; raise vram or place less there");
  }
  Arena arena(rounded, purpose);
  const uintptr_t address = next_;
  // One unused stretch after each block: running over its end is noticed.
  next_ += static_cast<uintptr_t>(rounded + kDeviceAlignment);
  used_bytes_ += rounded;
  blocks_.emplace(address, Block{std::move(arena), rounded});
  return static_cast<DeviceAddress>(address);
}

void SimDevice::release(DeviceAddress address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = blocks_.find(static_cast<uintptr_t>(address));
  if (it == blocks_.end()) fail(ErrorKind::kInvalid, "[sim] released what was not allocated");
  used_bytes_ -= it->second.bytes;
  blocks_.erase(it);
}

std::byte* SimDevice::allocate_host(int64_t bytes, const char* purpose) {
  const std::lock_guard<std::mutex> lock(mutex_);
  begin_allocation(bytes, purpose);
  Arena arena(bytes, purpose);
  std::byte* data = arena.data();
  host_blocks_.emplace(data, std::move(arena));
  return data;
}

void SimDevice::release_host(std::byte* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  host_blocks_.erase(memory);
}

std::vector<std::span<const std::byte>> SimDevice::lazy_memory() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::span<const std::byte>> found;
  for (const auto& [address, block] : blocks_) found.push_back(block.memory.memory());
  for (const auto& [address, arena] : host_blocks_) found.push_back(arena.memory());
  return found;
}

std::unique_ptr<Stream> SimDevice::create_stream() {
  return std::make_unique<SimStream>(*this, ++streams_);
}

std::unique_ptr<Event> SimDevice::create_event() {
  return std::make_unique<SimEvent>(*this);
}

// The byte order of bf16c belongs to the CPU's kernels; an accelerator never has it.
bool SimDevice::takes(const Format& format) const {
  return format.codes != Codes::kBF16C && cpu::multiplies(kernels_, format);
}

int64_t SimDevice::workspace_bytes(const Plan& plan, std::span<const UnitSpec> units) const {
  return cpu::CpuStage::workspace_bytes(plan, units, kernels_, threads_.size());
}

std::byte* SimDevice::translate(DeviceAddress address, int64_t bytes) const {
  const auto value = static_cast<uintptr_t>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto it = blocks_.upper_bound(value);
  if (it != blocks_.begin()) {
    --it;
    const auto offset = static_cast<int64_t>(value - it->first);
    if (offset + bytes <= it->second.bytes) return it->second.memory.data() + offset;
  }
  fail(ErrorKind::kInvalid, "[sim] ", bytes, " bytes at address ", value, " are not allocated");
}

std::unique_ptr<Stage> SimDevice::compile(const StageSpec& spec) {
  StageSpec host = spec;
  const auto translated = [&](DeviceAddress address) {
    if (address == DeviceAddress::kNull) return address;
    return cpu::device_address(translate(address, 1));
  };
  for (Weight& weight : host.weights) {
    if (!takes(weight.format)) refuse_format("sim", weight.format);
    weight.address = translated(weight.address);
  }
  for (DeviceAddress& value : host.values) value = translated(value);
  for (DeviceAddress& kv : host.kv) kv = translated(kv);
  host.workspace = translated(host.workspace);
  return std::make_unique<SimStage>(host, kernels_, threads_);
}

}  // namespace helm
