#include "base/thread_pool.h"

#include <chrono>

#include "base/check.h"

namespace helm {
namespace {

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

// Sleeping in the kernel is cheap for others and dear for us: a wake-up takes 50 us and more,
// above all in a virtual machine, and one late member makes all others wait and fall asleep in
// turn. Inside a step members are never apart for long, so they stay awake; between steps they wait
// about as long as sampling takes, so that an idle engine leaves its cores to others.
constexpr std::chrono::microseconds kAwakeInStep{5000};
constexpr std::chrono::microseconds kAwakeBetweenSteps{500};

// Pauses before the first yield, some 20 us: long enough for the usual imbalance.
constexpr int kPauses = 500;

// Returns once `value` differs from `old`: pauses, then yields to whoever shares the core, then
// sleeps in the kernel.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds awake) {
  for (int i = 0; i < kPauses; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  const Clock::time_point deadline = Clock::now() + awake;
  while (Clock::now() < deadline) {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::vector<int> cpus)
    : size_(threads < 1 ? 1 : threads),
      cpus_(std::move(cpus)),
      counters_(std::make_unique<Counter[]>(static_cast<size_t>(2 * size_))) {
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
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(Team&)>& work) {
  if (size_ > 1) {
    process_.check("[threads] these were started", "start others there");
    for (int i = 0; i < 2 * size_; ++i) {
      counters_[static_cast<size_t>(i)].taken.store(0, std::memory_order_relaxed);
    }
    work_ = &work;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }
  // Only now, the others being awake. A few microseconds with the way back; between runs the thread
  // stays where it was, unless the system needs that CPU.
  PinnedThread caller(cpu_of(0));
  caller_ = &caller;
  Team team(this, 0, size_);
  work(team);
  // The caller's own code may have forked, and gone on in the child.
  if (size_ > 1 && process_.here()) arrive_and_wait();
  caller_ = nullptr;
}

void ThreadPool::member_loop(int worker) {
  if (cpu_of(worker) >= 0) pin_thread(cpu_of(worker));
  uint32_t seen = 0;
  while (true) {
    wait_while(epoch_, seen, kAwakeBetweenSteps);
    ++seen;  // one call of run() at a time: the epoch never advances twice unseen
    if (stop_.load(std::memory_order_relaxed)) return;
    Team team(this, worker, size_);
    (*work_)(team);
    arrive_and_wait();
  }
}

void ThreadPool::arrive_and_wait() {
  const uint32_t phase = barrier_phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_phase_.fetch_add(1, std::memory_order_release);
    barrier_phase_.notify_all();
  } else {
    wait_while(barrier_phase_, phase, kAwakeInStep);
  }
}

void Team::barrier() {
  if (size_ > 1) pool_->arrive_and_wait();
}

}  // namespace helm
