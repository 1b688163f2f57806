// The scheduler against a naive one that is written from the rules alone, and whole runs of it on a
// clock that only counts.
#include "serve/scheduler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "support/this_build.h"

namespace {

using helm::Batch;
using helm::Runner;
using helm::Scheduler;
using helm::Snapshot;
using helm::StepPolicy;

// A request of the virtual run.
struct Job {
  int64_t arrival, prompt, output;
  int64_t computed = 0, drawn = 0;  // prompt tokens submitted; tokens drawn
  bool flying = false;              // an output is on its way
  size_t group = 0;
  int64_t waited = 0;  // steps in which it could have had a row and had none
};

int64_t pending_of(const Job& job) {
  if (job.drawn > 0) return job.flying ? 0 : 1;
  return job.prompt - job.computed;
}

// With one group: those that decode in order of arrival, then prompts, as far as the step goes.
// Beside decoding ones prompts have so many rows at most, and none while those are on their way.
std::vector<std::pair<size_t, int64_t>> naive_batch(const StepPolicy& policy,
                                                    const std::vector<Runner>& runners,
                                                    int64_t prompt_rows) {
  std::vector<std::pair<size_t, int64_t>> rows;
  bool ready = true, decoders = false;
  for (const Runner& runner : runners) {
    ready = ready && !(runner.decoding && runner.pending == 0);
    decoders = decoders || runner.decoding;
  }
  int64_t left = policy.step_tokens;
  int64_t outputs = policy.step_outputs;
  for (int turn = 0; turn < 2; ++turn) {
    if (turn == 1 && decoders && left > prompt_rows) left = prompt_rows;
    if (turn == 1 && !ready) continue;
    for (size_t i = 0; i < runners.size(); ++i) {
      if (runners[i].decoding != (turn == 0) || (turn == 0 && !ready)) continue;
      int64_t count = 0;
      while (count < runners[i].pending && count < left) ++count;
      if (count == 0 || (count == runners[i].pending && outputs == 0)) continue;
      if (count == runners[i].pending) --outputs;
      left -= count;
      rows.emplace_back(i, count);
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("a batch has the rows that the rules say, whatever runs") {
  std::mt19937 random(11);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random()) % n; };
  for (int round = 0; round < 4000; ++round) {
    CAPTURE(round);
    const StepPolicy policy{1 + below(40), 1 + below(8), 1, below(2) == 0, 1 + below(2)};
    Snapshot snapshot;
    for (int64_t i = below(10); i > 0; --i) {
      const bool decoding = below(2) == 0;
      snapshot.runners.push_back({decoding ? below(8) > 0 : below(30), decoding, 0});
    }
    if (below(2) == 0) snapshot.prompt_rows = below(30);
    Batch batch;
    Scheduler(policy).plan(snapshot, batch);
    std::vector<std::pair<size_t, int64_t>> rows;
    for (const helm::BatchRow& row : batch.rows) {
      rows.emplace_back(row.runner, row.tokens);
      CHECK(row.output == (row.tokens == snapshot.runners[row.runner].pending));
    }
    CHECK(rows == naive_batch(policy, snapshot.runners, snapshot.prompt_rows));
    CHECK(batch.groups.size() == snapshot.runners.size());
  }
}

TEST_CASE("every request ends once, and none that decodes is passed over, at any load") {
  for (const int64_t groups : {1, 2, 3}) {
    for (const double load : {0.5, 1.0, 2.0}) {
      CAPTURE(groups);
      CAPTURE(load);
      const StepPolicy policy{64, 8, groups, true, groups > 1 ? groups : 2};
      const Scheduler scheduler(policy);
      std::mt19937 random(static_cast<uint32_t>(groups * 10 + static_cast<int64_t>(load * 2)));
      std::exponential_distribution<double> gap(load / 6.0);
      std::vector<Job> jobs;
      double when = 0;
      for (int i = 0; i < 2000; ++i) {
        when += gap(random);
        jobs.push_back({static_cast<int64_t>(when), 1 + static_cast<int64_t>(random() % 150),
                        1 + static_cast<int64_t>(random() % 40)});
      }
      size_t arrived = 0;
      std::vector<Job*> running;
      std::vector<std::vector<Job*>> flights;
      int64_t ended = 0;
      Snapshot snapshot;
      Batch batch;
      for (int64_t clock = 0; ended < std::ssize(jobs); ++clock) {
        REQUIRE(clock < 1000000);
        while (running.size() < 8 && arrived < jobs.size() && jobs[arrived].arrival <= clock) {
          running.push_back(&jobs[arrived++]);
        }
        const auto look = [&] {
          snapshot.runners.clear();
          for (const Job* job : running) {
            snapshot.runners.push_back({pending_of(*job), job->drawn > 0, job->group});
          }
        };
        look();
        const int64_t ahead = scheduler.ahead(snapshot);
        REQUIRE(ahead >= 1);
        while (std::ssize(flights) < ahead) {
          scheduler.plan(snapshot, batch);
          if (batch.rows.empty()) break;
          int64_t tokens = 0, outputs = 0;
          std::vector<Job*> flight;
          std::vector<int64_t> members(static_cast<size_t>(groups), 0);
          for (size_t i = 0; i < running.size(); ++i) {
            running[i]->group = batch.groups[i];
            if (running[i]->drawn > 0) ++members[batch.groups[i]];
            running[i]->waited += running[i]->drawn > 0 && pending_of(*running[i]) > 0;
          }
          const auto decodes = [](const Job* job) { return job->drawn > 0; };
          const bool decoders = std::ranges::any_of(running, decodes);
          // Nobody's token waits behind a step of prompts alone.
          CHECK(decoders == std::ranges::any_of(batch.rows, [&](const helm::BatchRow& row) {
                  return decodes(running[row.runner]);
                }));
          for (const helm::BatchRow& row : batch.rows) {
            Job& job = *running[row.runner];
            REQUIRE(row.tokens >= 1);
            REQUIRE(row.tokens <= pending_of(job));
            tokens += row.tokens;
            outputs += row.output;
            if (job.drawn == 0) job.computed += row.tokens;
            job.flying = row.output;
            job.waited = 0;
            if (row.output) flight.push_back(&job);
          }
          REQUIRE(tokens <= policy.step_tokens);
          REQUIRE(outputs <= policy.step_outputs);
          snapshot.next_group = batch.next_group;
          flights.push_back(std::move(flight));
          look();
          // A row at least every turn of the groups, and one turn more where groups have changed.
          for (const Job* job : running) REQUIRE(job->waited <= 3 * groups);
        }
        if (flights.empty()) {
          REQUIRE(running.empty());
          continue;
        }
        for (Job* job : flights.front()) {
          job->flying = false;
          ++job->drawn;
          REQUIRE(job->drawn <= job->output);
          if (job->drawn == job->output) {
            ++ended;
            std::erase(running, job);
          }
        }
        flights.erase(flights.begin());
      }
      for (const Job& job : jobs) CHECK(job.computed == job.prompt);
    }
  }
}

TEST_CASE("a decision about 64 requests takes microseconds") {
  const Scheduler scheduler({512, 64, 2, true, 2});
  Snapshot snapshot;
  for (size_t i = 0; i < 64; ++i)
    snapshot.runners.push_back({i % 8 == 0 ? 300 : 1, i % 8 != 0, i % 2});
  Batch batch;
  double best_s = 1;
  for (int round = 0; round < 50; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; ++i) scheduler.plan(snapshot, batch);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best_s = std::min(best_s, took.count() / 20);
  }
  CHECK(batch.rows.size() == 30);
  MESSAGE("microseconds per decision: ", best_s * 1e6);
  CHECK(best_s < (helm::test::kSanitized ? 400e-6 : 20e-6));
}
