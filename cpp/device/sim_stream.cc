#include "device/sim_stream.h"

#include <algorithm>
#include <cstring>

#include "base/awake.h"
#include "device/sim_device.h"
#include "device/stage_bytes.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPieceBytes = int64_t{1} << 20;  // of a copy, between those of other streams
constexpr std::chrono::microseconds kAwake{300};   // longer than lanes of a cut layer differ

const int32_t* pages_end(const SequenceRun& run, const KvSpec& kv) {
  const int64_t blocks = run.blocks_end(kv.page_tokens) - run.first_block;
  return run.pages + std::max<int64_t>(0, blocks) * kv.entries();
}

}  // namespace

LaneTime SimProgress::wait_for(uint64_t point) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return passed >= point; });
  return at;
}

void SimProgress::pass(uint64_t point, LaneTime when, const std::exception_ptr& with) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    passed = point;
    at = when;
    failure = with;
  }
  changed.notify_all();
}

void SimEvent::synchronize() {
  uint64_t point = 0;
  {
    const std::lock_guard<std::mutex> lock(progress->mutex);
    point = progress->recorded;
  }
  if (device_.as_fast_as_host()) {
    await_awake(kAwake, [&] { return progress->passed.load(std::memory_order_relaxed) >= point; });
  }
  progress->wait_for(point);
  const std::lock_guard<std::mutex> lock(progress->mutex);
  if (progress->failure) std::rethrow_exception(progress->failure);
}

void StepCopy::assign(const StepView& step, const KvSpec& kv) {
  token_ids_.assign(step.token_ids.begin(), step.token_ids.end());
  positions_.assign(step.positions.begin(), step.positions.end());
  output_rows_.assign(step.output_rows.begin(), step.output_rows.end());
  runs_.assign(step.runs.begin(), step.runs.end());
  pages_.clear();
  for (const SequenceRun& run : runs_) pages_.insert(pages_.end(), run.pages, pages_end(run, kv));
  const int32_t* next = pages_.data();
  for (SequenceRun& run : runs_) {
    const auto count = pages_end(run, kv) - run.pages;
    run.pages = next;
    next += count;
  }
}

SimStream::~SimStream() {
  enqueue(Kind::kStop, [](Command&) {});
  thread_.join();
}

void SimStream::upload(DeviceAddress to, const void* from, int64_t bytes) {
  copy(Kind::kUpload, device_.translate(to, bytes), from, bytes);
}

void SimStream::download(void* to, DeviceAddress from, int64_t bytes) {
  copy(Kind::kDownload, to, device_.translate(from, bytes), bytes);
}

void SimStream::record(Event& event) {
  const std::shared_ptr<SimProgress>& progress = static_cast<SimEvent&>(event).progress;
  uint64_t point = 0;
  {
    const std::lock_guard<std::mutex> lock(progress->mutex);
    point = ++progress->recorded;
  }
  enqueue(Kind::kRecord, [&](Command& command) {
    command.progress = progress;
    command.point = point;
  });
}

void SimStream::wait(Event& event) {
  const std::shared_ptr<SimProgress>& progress = static_cast<SimEvent&>(event).progress;
  uint64_t point = 0;
  {
    const std::lock_guard<std::mutex> lock(progress->mutex);
    point = progress->recorded;
  }
  enqueue(Kind::kWait, [&](Command& command) {
    command.progress = progress;
    command.point = point;
  });
}

void SimStream::synchronize() {
  SimEvent event(device_);
  record(event);
  event.synchronize();
}

void SimStream::run(cpu::CpuStage& stage, const StageSpec& spec, const StepView& step) {
  enqueue(Kind::kStage, [&](Command& command) {
    command.stage = &stage;
    command.spec = &spec;
    command.step.assign(step, spec.plan->kv);
  });
}

void SimStream::copy(Kind kind, void* to, const void* from, int64_t bytes) {
  enqueue(kind, [&](Command& command) {
    command.to = to;
    command.from = from;
    command.bytes = bytes;
  });
}

template <typename Fill>
void SimStream::enqueue(Kind kind, const Fill& fill) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return end_ - begin_ < ring_.size(); });
    Command& command = ring_[end_ % ring_.size()];
    command.kind = kind;
    command.enqueued = Clock::now();
    fill(command);
    ++end_;
  }
  changed_.notify_all();
}

void SimStream::loop() {
  for (;;) {
    if (computes_ && device_.as_fast_as_host()) {
      await_awake(kAwake, [&] { return end_.load(std::memory_order_relaxed) != begin_; });
    }
    Command* command = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return end_ != begin_; });
      command = &ring_[begin_ % ring_.size()];
    }
    if (command->kind == Kind::kStop) return;
    execute(*command);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++begin_;
    }
    changed_.notify_all();
  }
}

void SimStream::execute(Command& command) {
  at_ = std::max(at_, command.enqueued);
  if (command.kind == Kind::kRecord) {
    command.progress->pass(command.point, at_, failure_);
    command.progress.reset();
    return;
  }
  if (failure_) return;
  try {
    delay();
    device_.begin_command();
    if (command.kind == Kind::kWait) {
      at_ = std::max(at_, command.progress->wait_for(command.point));
    } else if (command.kind == Kind::kStage) {
      execute_stage(command);
    } else {
      execute_copy(command);
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
  command.progress.reset();
}

void SimStream::delay() {
  const double most = device_.options().jitter_s;
  if (most <= 0) return;
  std::this_thread::sleep_for(
      LaneSeconds(std::uniform_real_distribution<double>(0, most)(random_)));
  at_ = std::max(at_, Clock::now());
}

// The latency counts once. Piece after piece, as other streams' pieces may come between them.
void SimStream::execute_copy(const Command& command) {
  const Clock::time_point start = Clock::now();
  std::memcpy(command.to, command.from, static_cast<size_t>(command.bytes));
  const LaneTime copied = later(at_, Clock::now() - start);
  const SimOptions& options = device_.options();
  const double rate = options.link_bytes_per_s;
  LaneClock& lane = command.kind == Kind::kUpload ? device_.up() : device_.down();
  LaneSeconds latency(options.latency_s);
  int64_t left = command.bytes;
  do {
    const int64_t piece = rate > 0 ? std::min(left, kPieceBytes) : left;
    at_ = lane.take(at_, latency + time_at(rate, piece));
    sleep_until(at_);
    latency = LaneSeconds(0);
    left -= piece;
  } while (left > 0);
  at_ = std::max(at_, copied);
}

void SimStream::execute_stage(const Command& command) {
  computes_ = true;
  const StepView step = command.step.view();
  const double rate = device_.options().memory_bytes_per_s;
  const LaneSeconds length = time_at(rate, rate > 0 ? stage_bytes(*command.spec, step) : 0);
  {
    const std::lock_guard<std::mutex> lock(device_.compute_mutex());
    const Clock::time_point start = Clock::now();
    command.stage->run(step);
    at_ = device_.compute().take(at_, std::max<LaneSeconds>(length, Clock::now() - start));
  }
  sleep_until(at_);
}

}  // namespace helm
