// Waiting for another thread for a short time without sleeping in the kernel. Sleeping is cheap for
// others and dear for us: a wake-up takes 50 us and more, above all in a virtual machine.
#pragma once

#include <chrono>
#include <thread>

namespace helm {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns whether done() came true: pauses, then yields to whoever shares the core, for about so
// long.
template <typename Done>
bool await_awake(std::chrono::microseconds awake, const Done& done) {
  using Clock = std::chrono::steady_clock;
  constexpr int kPauses = 500;  // some 20 us: long enough for the usual imbalance
  for (int i = 0; i < kPauses; ++i) {
    if (done()) return true;
    pause();
  }
  const Clock::time_point deadline = Clock::now() + awake;
  while (Clock::now() < deadline) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace helm
