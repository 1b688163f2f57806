#include "base/awake.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

TEST_CASE("what is done already is not waited for") {
  int asked = 0;
  CHECK(await_awake(std::chrono::hours(1), [&] { return ++asked == 1; }));
  CHECK(asked == 1);
}

TEST_CASE("waiting ends when another thread is done") {
  std::atomic<bool> done = false;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    done = true;
  });
  CHECK(await_awake(std::chrono::minutes(1), [&] { return done.load(); }));
  CHECK(done);
  other.join();
}

TEST_CASE("waiting ends, not before its time, where nothing is done") {
  const Clock::time_point begin = Clock::now();
  CHECK_FALSE(await_awake(std::chrono::milliseconds(2), [] { return false; }));
  CHECK(Clock::now() - begin >= std::chrono::milliseconds(2));
}

}  // namespace
}  // namespace helm
