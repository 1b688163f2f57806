// A persistent team of threads that runs one function at a time on all members (SPMD), with a cheap
// barrier and a shared loop inside it. Knows nothing of what the function computes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/affinity.h"
#include "base/process.h"

namespace helm {

class ThreadPool;

// One member's view of a running team.
class Team {
 public:
  int worker() const { return worker_; }
  int size() const { return size_; }

  // Waits until every member has arrived.
  void barrier();

  // The chunks of a loop over so many that this member starts with.
  struct Part {
    int64_t begin, end;
  };
  Part part(int64_t chunks) const { return part_of(worker_, size_, chunks); }
  static Part part_of(int worker, int size, int64_t chunks) {
    return {chunks * worker / size, chunks * (worker + 1) / size};
  }

  // Member 0: code of the caller's, with the affinity that the caller had, which threads that it
  // starts inherit.
  template <typename Call>
  void as_caller(const Call& call);

  // Calls body(begin, end) over [0, n) in pieces of at most `chunk`, shared among the members. Each
  // member goes through its own contiguous part from the front (memory that it touched first, in
  // one stream) and, when done, helps the others from the back of theirs. All members must call it
  // with equal arguments, and a barrier must separate two loops.
  template <typename Body>
  void parallel_for(int64_t n, int64_t chunk, const Body& body);

 private:
  friend class ThreadPool;
  Team(ThreadPool* pool, int worker, int size) : pool_(pool), worker_(worker), size_(size) {}

  // How many chunks of a member's part were taken: by the member itself from the front, and times
  // kFromBack by others from the back.
  std::atomic<int64_t>& taken(int phase, int worker);
  static constexpr int64_t kFromBack = int64_t{1} << 32;

  ThreadPool* pool_;
  int worker_;
  int size_;
  int phase_ = 0;  // which of two sets of loop counters is in use
};

class ThreadPool {
 public:
  // Member i works on CPU cpus[i] alone, as far as the system allows; members beyond `cpus` work
  // wherever the system puts them. Throws Error{kMemory} where the system refuses a thread.
  explicit ThreadPool(int threads, std::vector<int> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  const std::vector<int>& cpus() const { return cpus_; }

  // From now on the first `active` members make the team, 1 to size(); the others sleep. Not while
  // a run lasts.
  void resize(int active) { active_ = active; }
  int active() const { return active_; }

  // Runs work(team) on every active member; the caller is member 0 and has the affinity that it
  // came with when this returns, all being done. `work` must not throw. Calls must not overlap.
  // Throws Error{kInvalid} in a forked child, where the other members are missing.
  void run(const std::function<void(Team&)>& work);

  // What runs took since the last call of this: seconds of the caller, and seconds that members
  // were at work without a CPU, in all, which a pool of one thread does not count.
  struct Spent {
    double run_s = 0, lost_s = 0;
  };
  Spent take_spent();

 private:
  friend class Team;

  // Own cache line: written by one member at a time, read by those that help it.
  struct alignas(64) Counter {
    std::atomic<int64_t> taken{0};
  };

  // Own cache line: the caller calls, the member counts what it has lost.
  struct alignas(64) Member {
    std::atomic<uint32_t> calls{0};  // runs that it took part in, the present one too
    double lost_s = 0;
  };

  int cpu_of(int worker) const {
    return static_cast<size_t>(worker) < cpus_.size() ? cpus_[static_cast<size_t>(worker)] : -1;
  }
  void stop();
  void call(int worker);
  void member_loop(int worker);
  void work_as(int worker, const std::function<void(Team&)>& work);
  void arrive_and_wait(int team);

  const Process process_;
  const int size_;
  int active_;
  const std::vector<int> cpus_;     // by member
  PinnedThread* caller_ = nullptr;  // while a run lasts
  std::vector<std::thread> threads_;
  std::unique_ptr<Counter[]> counters_;  // [2, size]
  std::unique_ptr<Member[]> members_;    // [size]
  const std::function<void(Team&)>* work_ = nullptr;
  double run_s_ = 0;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_phase_{0};
  std::atomic<bool> stop_{false};
};

inline std::atomic<int64_t>& Team::taken(int phase, int worker) {
  return pool_->counters_[static_cast<size_t>(phase * size_ + worker)].taken;
}

template <typename Call>
void Team::as_caller(const Call& call) {
  pool_->caller_->lift();
  call();
  pool_->caller_->resume();
}

template <typename Body>
void Team::parallel_for(int64_t n, int64_t chunk, const Body& body) {
  if (size_ == 1) {
    for (int64_t begin = 0; begin < n; begin += chunk) {
      body(begin, begin + chunk < n ? begin + chunk : n);
    }
    return;
  }
  // The other set is idle until the next barrier: everyone left it before the last one.
  taken(phase_ ^ 1, worker_).store(0, std::memory_order_relaxed);
  const int64_t chunks = (n + chunk - 1) / chunk;
  for (int i = 0; i < size_; ++i) {
    const int owner = (worker_ + i) % size_;
    const auto [first, last] = part_of(owner, size_, chunks);
    std::atomic<int64_t>& counter = taken(phase_, owner);
    const auto left = [first = first, last = last](int64_t count) {  // before a claim
      return last - first - count % kFromBack - count / kFromBack;
    };
    while (left(counter.load(std::memory_order_relaxed)) > 0) {
      const int64_t before =
          counter.fetch_add(owner == worker_ ? 1 : kFromBack, std::memory_order_relaxed);
      if (left(before) <= 0) break;
      const int64_t mine =
          owner == worker_ ? first + before % kFromBack : last - 1 - before / kFromBack;
      const int64_t begin = mine * chunk;
      body(begin, begin + chunk < n ? begin + chunk : n);
    }
  }
  phase_ ^= 1;
}

}  // namespace helm
