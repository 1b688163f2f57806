// What the system says of where threads may run.
#pragma once

#include <doctest/doctest.h>
#include <sched.h>

#include <vector>

namespace helm::test {

// The CPUs that a thread of this process may run on, 0 for the calling one.
inline std::vector<int> allowed_cpus(pid_t thread = 0) {
  cpu_set_t set;
  REQUIRE(sched_getaffinity(thread, sizeof(set), &set) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// One of them for each of so many threads, the last first.
inline std::vector<int> one_cpu_each(int threads) {
  const std::vector<int> allowed = allowed_cpus();
  std::vector<int> cpus;
  for (int i = 0; i < threads; ++i) {
    cpus.push_back(allowed[allowed.size() - 1 - static_cast<size_t>(i) % allowed.size()]);
  }
  return cpus;
}

}  // namespace helm::test
