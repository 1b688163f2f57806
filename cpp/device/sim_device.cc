#include "device/sim_device.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <random>
#include <thread>

#include "base/check.h"
#include "cpu/stage.h"
#include "device/formats.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

// No user-space address of x86-64 or arm64: dereferencing one faults.
constexpr uintptr_t kFirstAddress = uintptr_t{0x5157} << 48;
constexpr auto kSleepOvershoot = std::chrono::microseconds(100);

// How far a stream has come; shared by the event and the commands that refer to it.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t passed = 0;
  std::exception_ptr failure;

  void wait_for(uint64_t point) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed >= point; });
  }
  void pass(uint64_t point, const std::exception_ptr& with) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      passed = point;
      failure = with;
    }
    changed.notify_all();
  }
};

class SimEvent final : public Event {
 public:
  void synchronize() override {
    uint64_t point = 0;
    {
      const std::lock_guard<std::mutex> lock(progress->mutex);
      point = progress->recorded;
    }
    progress->wait_for(point);
    const std::lock_guard<std::mutex> lock(progress->mutex);
    if (progress->failure) std::rethrow_exception(progress->failure);
  }

  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
};

// What a stage needs of a step, copied because the caller goes on.
class StepCopy {
 public:
  void assign(const StepView& step, const KvSpec& kv) {
    token_ids_.assign(step.token_ids.begin(), step.token_ids.end());
    positions_.assign(step.positions.begin(), step.positions.end());
    output_rows_.assign(step.output_rows.begin(), step.output_rows.end());
    runs_.assign(step.runs.begin(), step.runs.end());
    pages_.clear();
    for (const SequenceRun& run : runs_) pages_.insert(pages_.end(), run.pages, end(run, kv));
    const int32_t* next = pages_.data();
    for (SequenceRun& run : runs_) {
      const auto count = end(run, kv) - run.pages;
      run.pages = next;
      next += count;
    }
  }
  StepView view() const { return {token_ids_, positions_, output_rows_, runs_}; }

 private:
  static const int32_t* end(const SequenceRun& run, const KvSpec& kv) {
    const int64_t blocks = run.blocks_end(kv.page_tokens) - run.first_block;
    return run.pages + std::max<int64_t>(0, blocks) * kv.layers;
  }

  std::vector<int32_t> token_ids_, positions_, output_rows_, pages_;
  std::vector<SequenceRun> runs_;
};

struct Command {
  enum class Kind : uint8_t { kCopy, kStage, kRecord, kWait, kStop };
  Kind kind = Kind::kStop;
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
  cpu::CpuStage* stage = nullptr;
  StepCopy step;
  std::shared_ptr<Progress> progress;
  uint64_t point = 0;
};

// A thread that executes commands in order, from a ring whose slots are reused. After a failure
// nothing is executed any more, and every event recorded later reports it.
class SimStream final : public Stream {
 public:
  SimStream(SimDevice& device, uint32_t seed)
      : device_(device), random_(seed), thread_([this] { loop(); }) {}
  ~SimStream() override {
    enqueue([](Command& command) { command.kind = Command::Kind::kStop; });
    thread_.join();
  }

  void upload(DeviceAddress to, const void* from, int64_t bytes) override {
    copy(device_.translate(to, bytes), from, bytes);
  }
  void download(void* to, DeviceAddress from, int64_t bytes) override {
    copy(to, device_.translate(from, bytes), bytes);
  }
  void record(Event& event) override {
    const std::shared_ptr<Progress>& progress = static_cast<SimEvent&>(event).progress;
    uint64_t point = 0;
    {
      const std::lock_guard<std::mutex> lock(progress->mutex);
      point = ++progress->recorded;
    }
    enqueue([&](Command& command) {
      command.kind = Command::Kind::kRecord;
      command.progress = progress;
      command.point = point;
    });
  }
  void wait(Event& event) override {
    const std::shared_ptr<Progress>& progress = static_cast<SimEvent&>(event).progress;
    uint64_t point = 0;
    {
      const std::lock_guard<std::mutex> lock(progress->mutex);
      point = progress->recorded;
    }
    enqueue([&](Command& command) {
      command.kind = Command::Kind::kWait;
      command.progress = progress;
      command.point = point;
    });
  }
  void synchronize() override {
    SimEvent event;
    record(event);
    event.synchronize();
  }
  void run(cpu::CpuStage& stage, const StepView& step, const KvSpec& kv) {
    enqueue([&](Command& command) {
      command.kind = Command::Kind::kStage;
      command.stage = &stage;
      command.step.assign(step, kv);
    });
  }

 private:
  void copy(void* to, const void* from, int64_t bytes) {
    enqueue([&](Command& command) {
      command.kind = Command::Kind::kCopy;
      command.to = to;
      command.from = from;
      command.bytes = bytes;
    });
  }

  template <typename Fill>
  void enqueue(const Fill& fill) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return end_ - begin_ < ring_.size(); });
      fill(ring_[end_ % ring_.size()]);
      ++end_;
    }
    changed_.notify_all();
  }

  void loop() {
    for (;;) {
      Command* command = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return end_ != begin_; });
        command = &ring_[begin_ % ring_.size()];
      }
      if (command->kind == Command::Kind::kStop) return;
      execute(*command);
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++begin_;
      }
      changed_.notify_all();
    }
  }

  void execute(Command& command) {
    if (command.kind == Command::Kind::kRecord) {
      command.progress->pass(command.point, failure_);
      command.progress.reset();
      return;
    }
    if (failure_) return;
    try {
      delay();
      device_.begin_command();
      if (command.kind == Command::Kind::kCopy) execute_copy(command);
      if (command.kind == Command::Kind::kWait) command.progress->wait_for(command.point);
      if (command.kind == Command::Kind::kStage) {
        const std::lock_guard<std::mutex> lock(device_.compute_mutex());
        command.stage->run(command.step.view());
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
    command.progress.reset();
  }

  void delay() {
    const double most = device_.options().jitter_s;
    if (most <= 0) return;
    std::this_thread::sleep_for(
        std::chrono::duration<double>(std::uniform_real_distribution<double>(0, most)(random_)));
  }

  void execute_copy(const Command& command) {
    const Clock::time_point start = Clock::now();
    std::memcpy(command.to, command.from, static_cast<size_t>(command.bytes));
    const SimOptions& options = device_.options();
    double seconds = options.latency_s;
    if (options.link_bytes_per_s > 0) {
      seconds += static_cast<double>(command.bytes) / options.link_bytes_per_s;
    }
    if (seconds <= 0) return;
    const Clock::time_point end =
        start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::this_thread::sleep_until(end - kSleepOvershoot);
    while (Clock::now() < end) std::this_thread::yield();
  }

  SimDevice& device_;
  std::minstd_rand random_;  // of the delays
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Command, 64> ring_;
  size_t begin_ = 0;  // commands executed
  size_t end_ = 0;    // commands enqueued
  std::exception_ptr failure_;
  std::thread thread_;
};

class SimStage final : public Stage {
 public:
  SimStage(const StageSpec& spec, const cpu::KernelTable& kernels, ThreadPool& threads)
      : stage_(spec, kernels, threads), kv_(spec.plan->kv) {}
  void run(Stream& stream, const StepView& step) override {
    static_cast<SimStream&>(stream).run(stage_, step, kv_);
  }

 private:
  cpu::CpuStage stage_;
  KvSpec kv_;
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
  return std::make_unique<SimEvent>();
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
  host.kv = translated(host.kv);
  host.workspace = translated(host.workspace);
  return std::make_unique<SimStage>(host, kernels_, threads_);
}

}  // namespace helm
