// The streams and events of the simulated accelerator: threads that execute commands in order, in
// the time that the simulated device would take.
//
// A command begins when it was enqueued, the one before it on the stream has ended, and its lane is
// free: up, down, or the memory and kernels that all stages share. It takes what the options say,
// or longer if the host does. All this is counted, so that it does not add up how late the system
// wakes a thread: threads sleep until a command's end and never spin. A device without rates is as
// fast as its threads, which stay awake for a moment as those of a team do.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cpu/stage.h"
#include "device/device.h"
#include "device/lane_clock.h"

namespace helm {

class SimDevice;

// How far a stream has come; shared by the event and the commands that refer to it.
struct SimProgress {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  std::atomic<uint64_t> passed = 0;  // written with the mutex
  LaneTime at{};                     // when the last point was passed
  std::exception_ptr failure;

  LaneTime wait_for(uint64_t point);
  void pass(uint64_t point, LaneTime when, const std::exception_ptr& with);
};

class SimEvent final : public Event {
 public:
  explicit SimEvent(const SimDevice& device) : device_(device) {}
  void synchronize() override;

  std::shared_ptr<SimProgress> progress = std::make_shared<SimProgress>();

 private:
  const SimDevice& device_;
};

// What a stage needs of a step, copied because the caller goes on.
class StepCopy {
 public:
  void assign(const StepView& step, const KvSpec& kv);
  StepView view() const { return {token_ids_, positions_, output_rows_, runs_}; }

 private:
  std::vector<int32_t> token_ids_, positions_, output_rows_, pages_;
  std::vector<SequenceRun> runs_;
};

// Commands wait in a ring whose slots are reused. After a failure nothing is executed any more, and
// every event recorded later reports it.
class SimStream final : public Stream {
 public:
  SimStream(SimDevice& device, uint32_t seed)
      : device_(device), random_(seed), thread_([this] { loop(); }) {}
  ~SimStream() override;

  void upload(DeviceAddress to, const void* from, int64_t bytes) override;
  void download(void* to, DeviceAddress from, int64_t bytes) override;
  void record(Event& event) override;
  void wait(Event& event) override;
  void synchronize() override;
  // `stage` and its `spec` must stay until the stream has run them.
  void run(cpu::CpuStage& stage, const StageSpec& spec, const StepView& step);

 private:
  enum class Kind : uint8_t { kUpload, kDownload, kStage, kRecord, kWait, kStop };
  struct Command {
    Kind kind = Kind::kStop;
    LaneTime enqueued{};
    void* to = nullptr;
    const void* from = nullptr;
    int64_t bytes = 0;
    cpu::CpuStage* stage = nullptr;
    const StageSpec* spec = nullptr;
    StepCopy step;
    std::shared_ptr<SimProgress> progress;
    uint64_t point = 0;
  };

  template <typename Fill>
  void enqueue(Kind kind, const Fill& fill);
  void copy(Kind kind, void* to, const void* from, int64_t bytes);
  void loop();
  void execute(Command& command);
  void delay();
  void execute_copy(const Command& command);
  void execute_stage(const Command& command);

  SimDevice& device_;
  std::minstd_rand random_;  // of the delays
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Command, 64> ring_;
  size_t begin_ = 0;             // commands executed
  std::atomic<size_t> end_ = 0;  // commands enqueued; written with the mutex
  LaneTime at_{};                // when the last command ended, on the device that is simulated
  bool computes_ = false;        // has run a stage
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace helm
