#include "base/thread_pool.h"

#include <chrono>

#include "base/awake.h"
#include "base/check.h"
#include "base/thread_clocks.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

// One late member makes all others wait and fall asleep in turn. Inside a step members are never
// apart for long, so they stay awake; between steps they wait about as long as sampling takes, so
// that an idle engine leaves its cores to others.
constexpr std::chrono::microseconds kAwakeInStep{5000};
constexpr std::chrono::microseconds kAwakeBetweenSteps{500};

// Returns once `value` differs from `old`: stays awake, then sleeps in the kernel.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds awake) {
  const auto changed = [&] { return value.load(std::memory_order_acquire) != old; };
  if (await_awake(awake, changed)) return;
  while (!changed()) value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::vector<int> cpus)
    : size_(threads < 1 ? 1 : threads),
      active_(size_),
      cpus_(std::move(cpus)),
      counters_(std::make_unique<Counter[]>(static_cast<size_t>(2 * size_))),
      members_(std::make_unique<Member[]>(static_cast<size_t>(size_))) {
  threads_.reserve(static_cast<size_t>(size_ - 1));
  for (int worker = 1; worker < size_; ++worker) {
    try {
      threads_.emplace_back([this, worker] { member_loop(worker); });
    } catch (const std::system_error& error) {
      stop();
      fail_to_start(worker, size_, error);
    }
  }
}

ThreadPool::~ThreadPool() {
  if (process_.here()) {
    stop();
  } else {
    new std::vector<std::thread>(std::move(threads_));  // nothing is there to be joined
  }
}

void ThreadPool::stop() {
  stop_.store(true, std::memory_order_relaxed);
  for (size_t i = 0; i < threads_.size(); ++i) call(static_cast<int>(i) + 1);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::call(int worker) {
  std::atomic<uint32_t>& calls = members_[static_cast<size_t>(worker)].calls;
  calls.store(calls.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  calls.notify_one();
}

void ThreadPool::run(const std::function<void(Team&)>& work) {
  const Clock::time_point begin = Clock::now();
  if (size_ > 1) process_.check("[threads] these were started", "start others there");
  if (active_ > 1) {
    for (int i = 0; i < 2 * active_; ++i) {
      counters_[static_cast<size_t>(i)].taken.store(0, std::memory_order_relaxed);
    }
    work_ = &work;
    for (int worker = 1; worker < active_; ++worker) call(worker);
  }
  // Only now, the others being awake. A few microseconds with the way back; between runs the thread
  // stays where it was, unless the system needs that CPU.
  PinnedThread caller(cpu_of(0));
  caller_ = &caller;
  work_as(0, work);
  // The caller's own code may have forked, and gone on in the child.
  if (active_ > 1 && process_.here()) arrive_and_wait(active_);
  caller_ = nullptr;
  run_s_ += std::chrono::duration<double>(Clock::now() - begin).count();
}

ThreadPool::Spent ThreadPool::take_spent() {
  Spent spent{std::exchange(run_s_, 0.0), 0.0};
  for (int worker = 0; worker < size_; ++worker) {
    spent.lost_s += std::exchange(members_[static_cast<size_t>(worker)].lost_s, 0.0);
  }
  return spent;
}

void ThreadPool::member_loop(int worker) {
  if (cpu_of(worker) >= 0) pin_thread(cpu_of(worker));
  uint32_t seen = 0;
  while (true) {
    wait_while(members_[static_cast<size_t>(worker)].calls, seen, kAwakeBetweenSteps);
    ++seen;  // no run ends without its members
    if (stop_.load(std::memory_order_relaxed)) return;
    const int team = active_;
    work_as(worker, *work_);
    arrive_and_wait(team);
  }
}

void ThreadPool::work_as(int worker, const std::function<void(Team&)>& work) {
  Team team(this, worker, active_);
  if (size_ == 1) return work(team);
  const ThreadClocks before = ThreadClocks::now();
  work(team);
  members_[static_cast<size_t>(worker)].lost_s += ThreadClocks::now().lost_s(before);
}

// `team` is the caller's: once all have arrived, the pool may have another.
void ThreadPool::arrive_and_wait(int team) {
  const uint32_t phase = barrier_phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_phase_.fetch_add(1, std::memory_order_release);
    barrier_phase_.notify_all();
  } else {
    wait_while(barrier_phase_, phase, kAwakeInStep);
  }
}

void Team::barrier() {
  if (size_ > 1) pool_->arrive_and_wait(size_);
}

}  // namespace helm
