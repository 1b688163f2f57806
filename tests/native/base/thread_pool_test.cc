// The thread pool: every piece exactly once, barriers that order memory, many short runs; where its
// threads run, and what they cost when there is nothing to do.
#include <doctest/doctest.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "affinity.h"
#include "base/thread_pool.h"

namespace {

using helm::test::allowed_cpus;
using helm::test::one_cpu_each;

double seconds(clockid_t clock) {
  timespec t{};
  REQUIRE(clock_gettime(clock, &t) == 0);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// By member: the clock of the CPU time that its thread uses.
std::vector<clockid_t> clocks_of(helm::ThreadPool& pool) {
  std::vector<clockid_t> clocks(static_cast<size_t>(pool.size()));
  pool.run([&](helm::Team& team) {
    pthread_getcpuclockid(pthread_self(), &clocks[static_cast<size_t>(team.worker())]);
  });
  return clocks;
}

double total(const std::vector<clockid_t>& clocks) {
  double sum = 0;
  for (const clockid_t clock : clocks) sum += seconds(clock);
  return sum;
}

// CPU seconds that the threads of `clocks` take for `work`, the median of nine: on a busy machine a
// member gets its core long after it was woken, so that one run's time falls into the next, and a
// virtual machine counts as used what its host took away.
template <typename Work>
double median_cpu_s(const std::vector<clockid_t>& clocks, const Work& work) {
  std::array<double, 9> seconds{};
  for (double& s : seconds) {
    const double start = total(clocks);
    work();
    s = total(clocks) - start;
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

TEST_CASE("parallel_for visits every index exactly once") {
  for (const int threads : {1, 2, 3, 5}) {
    helm::ThreadPool pool(threads);
    for (const int64_t n : {0, 1, 2, 7, 64, 1000}) {
      for (const int64_t chunk : {1, 3, 64}) {
        std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
        pool.run([&](helm::Team& team) {
          team.parallel_for(n, chunk, [&](int64_t begin, int64_t end) {
            CHECK(end - begin <= chunk);
            for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
          });
        });
        for (const std::atomic<int>& count : visits) CHECK(count == 1);
      }
    }
  }
}

// The body of member 0's first piece waits until everything else is done: so others take the rest
// of its part, from the back, whichever thread is first.
TEST_CASE("members help from the back of another's part") {
  for (const int threads : {2, 3, 5}) {
    for (const int64_t n : {2, 7, 64, 1000}) {
      helm::ThreadPool pool(threads);
      std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
      std::atomic<int64_t> done{0};
      std::vector<int64_t> helped(static_cast<size_t>(threads),
                                  INT64_MAX);  // of member 0's, by member
      std::atomic<int> wrong{0};
      pool.run([&](helm::Team& team) {
        const int64_t own_end = team.part_of(0, threads, n).end;
        team.parallel_for(n, 1, [&](int64_t i, int64_t) {
          ++visits[static_cast<size_t>(i)];
          int64_t& last = helped[static_cast<size_t>(team.worker())];
          if (team.worker() != 0 && i < own_end) {
            if (i >= last) ++wrong;
            last = i;
          }
          if (team.worker() == 0 && i == 0) {
            while (done < n - 1) std::this_thread::yield();
          }
          ++done;
        });
      });
      for (const std::atomic<int>& count : visits) CHECK(count == 1);
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a barrier makes the writes of one loop visible to the next") {
  constexpr int64_t kCells = 257;
  helm::ThreadPool pool(3);
  std::vector<int64_t> cells(kCells, 0);
  std::vector<int64_t> next(kCells, 0);
  pool.run([&](helm::Team& team) {
    for (int round = 0; round < 200; ++round) {
      team.parallel_for(kCells, 5, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const auto left = static_cast<size_t>((i + kCells - 1) % kCells);
          next[static_cast<size_t>(i)] = cells[left] + 1;
        }
      });
      team.barrier();
      team.parallel_for(kCells, 7, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          cells[static_cast<size_t>(i)] = next[static_cast<size_t>(i)];
        }
      });
      team.barrier();
    }
  });
  for (const int64_t cell : cells) CHECK(cell == 200);
}

TEST_CASE("workers are numbered and all take part in every run") {
  helm::ThreadPool pool(4);
  for (int round = 0; round < 300; ++round) {
    std::vector<int> seen(4, 0);
    pool.run([&](helm::Team& team) { seen[static_cast<size_t>(team.worker())] += team.size(); });
    CHECK(std::accumulate(seen.begin(), seen.end(), 0) == 16);
  }
}

TEST_CASE("a team that shrinks and grows has its members in every run, and no others") {
  helm::ThreadPool pool(4);
  for (int round = 0; round < 300; ++round) {
    const int active = 1 + round * 7 % 4;
    pool.resize(active);
    std::vector<int> seen(4, 0);
    std::vector<int> cells(100, 0);
    pool.run([&](helm::Team& team) {
      seen[static_cast<size_t>(team.worker())] += team.size();
      for (int loop = 0; loop < 3; ++loop) {
        team.parallel_for(100, 3, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++cells[static_cast<size_t>(i)];
        });
        team.barrier();
      }
    });
    for (int i = 0; i < 4; ++i) CHECK(seen[static_cast<size_t>(i)] == (i < active ? active : 0));
    CHECK(std::all_of(cells.begin(), cells.end(), [](int count) { return count == 3; }));
  }
}

TEST_CASE("a pool counts what its members lose to others") {
  std::thread([] {
    REQUIRE(helm::pin_thread(allowed_cpus().front()));
    helm::ThreadPool pool(2);  // its threads inherit the one CPU, so each is the other's
    const auto compute = [](helm::Team&) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
      while (std::chrono::steady_clock::now() < end) {
      }
    };
    pool.run(compute);
    const helm::ThreadPool::Spent both = pool.take_spent();
    CHECK(both.run_s > 0.09);
    CHECK(both.lost_s > 0.05);
    CHECK(both.lost_s < 2.2 * both.run_s);
    CHECK(pool.take_spent().run_s == 0);
    CHECK(pool.take_spent().lost_s == 0);
  }).join();
}

TEST_CASE("a pool asked for fewer than one thread has one") {
  helm::ThreadPool pool(0);
  int runs = 0;
  pool.run([&](helm::Team&) { ++runs; });
  CHECK(pool.size() == 1);
  CHECK(runs == 1);
}

TEST_CASE("members work on the CPUs that they were given; the caller gets its own back") {
  const std::vector<int> before = allowed_cpus();
  for (const int threads : {1, 2, 3}) {
    const std::vector<int> cpus = one_cpu_each(threads);
    helm::ThreadPool pool(threads, cpus);
    for (int round = 0; round < 3; ++round) {
      std::vector<std::vector<int>> seen(static_cast<size_t>(threads));
      pool.run(
          [&](helm::Team& team) { seen[static_cast<size_t>(team.worker())] = allowed_cpus(); });
      for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == std::vector<int>{cpus[i]});
      CHECK(allowed_cpus() == before);
    }
  }
}

TEST_CASE("code of the caller's runs with the caller's affinity, and so do its threads") {
  const std::vector<int> before = allowed_cpus();
  const std::vector<int> cpus = one_cpu_each(2);
  helm::ThreadPool pool(2, cpus);
  std::vector<int> called, started, after;
  pool.run([&](helm::Team& team) {
    if (team.worker() != 0) return;
    team.as_caller([&] {
      called = allowed_cpus();
      std::thread([&] { started = allowed_cpus(); }).join();
    });
    after = allowed_cpus();
  });
  CHECK(called == before);
  CHECK(started == before);
  CHECK(after == std::vector<int>{cpus[0]});
  CHECK(allowed_cpus() == before);
}

TEST_CASE("a CPU that cannot be had leaves its member where it was") {
  const std::vector<int> before = allowed_cpus();
  helm::ThreadPool pool(2, {CPU_SETSIZE - 1, CPU_SETSIZE});
  std::vector<std::vector<int>> seen(2);
  pool.run([&](helm::Team& team) { seen[static_cast<size_t>(team.worker())] = allowed_cpus(); });
  CHECK(seen[0] == before);
  CHECK(seen[1] == before);
  CHECK(allowed_cpus() == before);
}

TEST_CASE("an idle pool uses next to no CPU time") {
  helm::ThreadPool pool(3);
  const std::vector<clockid_t> clocks = clocks_of(pool);
  const double awake = median_cpu_s(clocks, [&] {
    for (int i = 0; i < 10; ++i) {  // as an engine that is asked for a token now and then
      pool.run([](helm::Team& team) { team.barrier(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  CHECK(awake < 0.05);  // of 0.6 s, were the members awake
  const double asleep =
      median_cpu_s(clocks, [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  CHECK(asleep < 0.001);
}

TEST_CASE("members that have left the team sleep while others work") {
  helm::ThreadPool pool(3);
  const std::vector<clockid_t> clocks = clocks_of(pool);
  pool.resize(1);
  const std::vector<clockid_t> others(clocks.begin() + 1, clocks.end());
  const double left = median_cpu_s(others, [&] {
    for (int i = 0; i < 1000; ++i) pool.run([](helm::Team& team) { team.barrier(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  CHECK(left < 0.001);
}

TEST_CASE("members that share a core hand it over at barriers") {
  const std::vector<int> before = allowed_cpus();
  std::thread([&] {
    REQUIRE(helm::pin_thread(before.front()));
    helm::ThreadPool pool(2);  // its threads inherit the one CPU
    const std::vector<clockid_t> clocks = clocks_of(pool);
    constexpr int kRuns = 50, kBarriers = 10;
    const double start = total(clocks);
    for (int i = 0; i < kRuns; ++i) {
      pool.run([](helm::Team& team) {
        for (int barrier = 1; barrier < kBarriers; ++barrier) team.barrier();
      });
    }
    // CPU time, as other programs may have the core for long. Who spins instead of yielding uses up
    // its time slice, a millisecond or more, before the other member can arrive.
    CHECK((total(clocks) - start) / (kRuns * kBarriers) < 3e-4);
  }).join();
  CHECK(allowed_cpus() == before);
}
