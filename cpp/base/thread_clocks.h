// What a thread has used and what has passed. Knows nothing of why.
#pragma once

#include <time.h>

namespace helm {

struct ThreadClocks {
  double cpu_s = 0;
  double wall_s = 0;

  static ThreadClocks now() {
    timespec cpu{}, wall{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);  // exact only for the calling thread
    clock_gettime(CLOCK_MONOTONIC, &wall);
    return {seconds(cpu), seconds(wall)};
  }

  // Time since then in which the thread had no CPU.
  double lost_s(const ThreadClocks& since) const {
    return (wall_s - since.wall_s) - (cpu_s - since.cpu_s);
  }

 private:
  static double seconds(const timespec& t) {
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
};

}  // namespace helm
