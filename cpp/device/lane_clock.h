// Time as a simulated resource spends it: one thing after the other, whatever thread asks.
#pragma once

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace helm {

using LaneTime = std::chrono::steady_clock::time_point;
using LaneSeconds = std::chrono::duration<double>;

// What so many bytes take, years at most; a rate of 0 is without bound.
inline LaneSeconds time_at(double bytes_per_s, int64_t bytes) {
  if (bytes_per_s <= 0) return LaneSeconds(0);
  return LaneSeconds(std::min(static_cast<double>(bytes) / bytes_per_s, 1e8));
}

inline LaneTime later(LaneTime from, LaneSeconds length) {
  return from + std::chrono::ceil<LaneTime::duration>(length);
}

// When a lane is free.
class LaneClock {
 public:
  // Takes the lane for so long, from `earliest` or from when it is free. Returns the end.
  LaneTime take(LaneTime earliest, LaneSeconds length) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_ = later(std::max(earliest, free_), length);
    return free_;
  }

 private:
  std::mutex mutex_;
  LaneTime free_{};
};

// Sleeps without spinning, and wakes some microseconds late: the system may add the thread's timer
// slack to every sleep, 50 us as a rule, so there is none meanwhile.
inline void sleep_until(LaneTime end) {
  if (std::chrono::steady_clock::now() >= end) return;
  const int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1);
  std::this_thread::sleep_until(end);
  if (slack > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack));
}

}  // namespace helm
