// The thread pool: every piece exactly once, barriers that order memory, many short runs.
#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <vector>

#include "base/thread_pool.h"

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

TEST_CASE("a pool asked for fewer than one thread has one") {
  helm::ThreadPool pool(0);
  int runs = 0;
  pool.run([&](helm::Team&) { ++runs; });
  CHECK(pool.size() == 1);
  CHECK(runs == 1);
}
