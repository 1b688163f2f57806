// One run of several threads that begin together. Knows nothing of what they do.
#pragma once

#include <barrier>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace helm::bench {

// Runs body on all threads at once, returns seconds from the common start to the last end.
inline double timed(int threads, const std::function<void(int, std::barrier<>&)>& body) {
  std::barrier sync(threads);
  std::chrono::steady_clock::time_point begin;
  const auto run = [&](int t) {
    sync.arrive_and_wait();
    if (t == 0) begin = std::chrono::steady_clock::now();
    body(t, sync);
    sync.arrive_and_wait();
  };
  std::vector<std::jthread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace helm::bench
