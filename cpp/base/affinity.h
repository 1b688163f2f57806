// On which CPUs threads may run. Knows nothing of who they are.
#pragma once

#include <sched.h>

namespace helm {

// Lets the calling thread run on `cpu` alone from now on, and the threads that it starts. Whether
// the system agreed; where it does not, nothing has changed.
bool pin_thread(int cpu);

// The memory node of the CPU that the calling thread is on; 0 where the system does not tell.
int current_node();

// Keeps the calling thread on one CPU while in scope, as far as the system allows: its affinity is
// the caller's business before and after. A negative `cpu` leaves the thread alone.
class PinnedThread {
 public:
  explicit PinnedThread(int cpu) : cpu_(cpu) {
    // What cannot be read could not be restored.
    if (cpu >= 0 && sched_getaffinity(0, sizeof(before_), &before_) == 0) pin();
  }
  ~PinnedThread() { lift(); }
  PinnedThread(const PinnedThread&) = delete;
  PinnedThread& operator=(const PinnedThread&) = delete;

  // Back to where the thread might run before, and to the CPU again.
  void lift() {
    if (pinned_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  void resume() {
    if (pinned_) pin();
  }

 private:
  void pin() { pinned_ = pin_thread(cpu_); }

  int cpu_;
  cpu_set_t before_{};
  bool pinned_ = false;
};

}  // namespace helm
