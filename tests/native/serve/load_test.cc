// What admits, ranks, grows, parks and batches, on a clock of its own and without an engine: every
// request ends exactly once, no block is lost, nobody waits beyond what the rules say.
//
// HELM_TEST_LOAD sets the requests of a run (100,000 take some seconds). HELM_TEST_TRACES names a
// folder with azure_llm_2023_code.csv and _conv.csv, whose requests are repeated then.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "serve/growth.h"
#include "serve/ranking.h"
#include "serve/scheduler.h"
#include "support/check.h"

namespace {

using helm::Place;
using helm::Ranking;

struct Shape {
  double gap_s;
  int64_t prompt, output;
};

struct Job {
  Place place;
  int64_t prompt = 0, output = 0, most = 0;
  int64_t cancel_at = -1;  // tokens, or never
  // While it runs:
  int64_t length = 0, capacity = 0, drawn = 0, pending = 0;
  int64_t blocks = 0, idle = 0;
  int64_t overtaken = 0;  // by others that began, once it had waited for too long
  bool running = false, again = false, due = false;
  int ends = 0;
};

constexpr int64_t kPage = 16, kBlocks = 1100, kPlaces = 32, kMostWaiting = 256, kKeys = 6;
constexpr int64_t kContext = 16384;

class Machine {
 public:
  explicit Machine(std::vector<Job>& jobs) : jobs_(jobs) {}

  // All of the jobs; those of which more than `most_waiting` wait are refused.
  void run(int64_t most_waiting) {
    size_t arrived = 0;
    while (arrived < jobs_.size() || !waiting_.empty() || !running_.empty()) {
      while (arrived < jobs_.size() && jobs_[arrived].place.since_s <= now_s_) {
        Job& job = jobs_[arrived++];
        if (std::ssize(waiting_) >= most_waiting) {
          end(job, refused_);
        } else {
          ranking_.come(job.place);
          waiting_.push_back(&job);
        }
      }
      admit();
      if (running_.empty()) {
        REQUIRE(waiting_.empty());  // what is alone always fits
        if (arrived < jobs_.size()) now_s_ = std::max(now_s_, jobs_[arrived].place.since_s);
        continue;
      }
      step();
      broken_ += used_ > kBlocks;
    }
    CHECK(used_ == 0);
    CHECK(broken_ == 0);
  }

  double now_s_ = 0;
  int64_t steps_ = 0, parked_ = 0, refused_ = 0, cancelled_ = 0, finished_ = 0;
  int64_t most_overtaken_ = 0, most_idle_ = 0, tokens_ = 0;

 private:
  void end(Job& job, int64_t& count) {
    ++job.ends;
    ++count;
  }
  void give_back(Job& job) {
    used_ -= job.blocks;
    job.blocks = job.capacity = job.length = 0;
    job.running = false;
  }
  bool reserve(Job& job, int64_t capacity, int64_t spare) {
    const int64_t blocks = (capacity + kPage - 1) / kPage;
    if (used_ + blocks - job.blocks + spare > kBlocks) return false;
    used_ += blocks - job.blocks;
    job.blocks = blocks;
    job.capacity = capacity;
    return true;
  }

  void admit() {
    std::vector<std::pair<Ranking::Turn, Job*>> line;
    for (Job* job : waiting_) line.emplace_back(ranking_.turn(job->place, now_s_), job);
    std::make_heap(line.begin(), line.end(), std::greater<>());
    while (!line.empty() && std::ssize(running_) < kPlaces) {
      std::pop_heap(line.begin(), line.end(), std::greater<>());
      Job& job = *line.back().second;
      line.pop_back();
      int64_t spare = 0;
      for (const Job* other : running_) spare += helm::next_blocks(other->capacity, other->most);
      const int64_t held = job.prompt + job.drawn;
      if (!reserve(job, helm::promised({}, held, job.most, kPage), spare)) return;
      job.pending = held;
      job.again = job.place.rank >= 0;
      if (!job.again) overtake(job);
      ranking_.begin(job.place, now_s_);
      job.running = true;
      const auto later = [](const Job* a, const Job* b) { return a->place.id < b->place.id; };
      running_.insert(std::upper_bound(running_.begin(), running_.end(), &job, later), &job);
      std::erase(waiting_, &job);
    }
  }

  // A request whose class and key nobody has begun of for three classes' ageing outranks whatever
  // has just come: only the heads of other classes and keys, once each, may still go before it.
  void overtake(const Job& begins) {
    double& begun_s =
        begun_s_[static_cast<size_t>(begins.place.key)][static_cast<size_t>(begins.place.priority)];
    for (Job* job : waiting_) {
      if (job == &begins || job->place.rank >= 0) continue;
      const double since_s = std::max(
          job->place.since_s,
          begun_s_[static_cast<size_t>(job->place.key)][static_cast<size_t>(job->place.priority)]);
      if (now_s_ - since_s < 3 * Ranking::kAgeing_s) {
        job->overtaken = 0;
      } else if (begins.place.key != job->place.key ||
                 begins.place.priority != job->place.priority) {
        most_overtaken_ = std::max(most_overtaken_, ++job->overtaken);
      }
    }
    begun_s = now_s_;
  }

  bool make_room() {
    for (const helm::BatchRow& row : batch_.rows) {
      Job& job = *running_[row.runner];
      const int64_t needed = job.length + row.tokens;
      if (needed <= job.capacity) continue;
      if (reserve(job, helm::whole_blocks(needed, job.most, kPage), 0)) continue;
      const auto yields = [](const Job* a, const Job* b) {
        return Ranking::yields(a->place, b->place);
      };
      Job* least = *std::min_element(running_.begin(), running_.end(), yields);
      REQUIRE(running_.size() > 1);  // one that is alone finds all it may come to hold
      broken_ += least == *std::max_element(running_.begin(), running_.end(), yields);
      give_back(*least);
      ++parked_;
      least->place.since_s = now_s_;
      std::erase(running_, least);
      waiting_.push_back(least);
      return false;
    }
    return true;
  }

  void step() {
    do {
      snapshot_.runners.clear();
      snapshot_.prompt_rows = 256;
      for (const Job* job : running_) {
        snapshot_.runners.push_back({job->pending, job->drawn > 0 && !job->again, 0});
      }
      scheduler_.plan(snapshot_, batch_);
    } while (!make_room());
    broken_ += batch_.rows.empty();
    int64_t rows = 0;
    for (Job* job : running_) job->due = job->drawn > 0 && !job->again;
    std::vector<Job*> drew;
    for (const helm::BatchRow& row : batch_.rows) {
      Job& job = *running_[row.runner];
      job.due = false;
      job.length += row.tokens;
      broken_ += job.length > job.capacity;
      job.pending -= row.tokens;
      rows += row.tokens;
      if (job.drawn == 0) ranking_.charge(job.place.key, row.tokens);
      if (row.output) drew.push_back(&job);
    }
    for (Job* job : running_) {
      job->idle = job->due ? job->idle + 1 : 0;
      most_idle_ = std::max(most_idle_, job->idle);
    }
    now_s_ += 0.02 + 2e-4 * static_cast<double>(rows);
    ++steps_;
    for (Job* job : drew) {
      job->again = false;
      ++job->drawn;
      ++tokens_;
      job->pending = 1;
      ranking_.charge(job->place.key, Ranking::kOutputWeight);
    }
    cancel_and_finish(running_);
    if (steps_ % 64 == 0) cancel_and_finish(waiting_);
  }

  void cancel_and_finish(std::vector<Job*>& list) {
    std::erase_if(list, [&](Job* job) {
      const bool leaves = job->cancel_at >= 0 && job->drawn >= job->cancel_at;
      if (!leaves && job->drawn < job->output) return false;
      give_back(*job);
      ranking_.leave(job->place);
      end(*job, leaves ? cancelled_ : finished_);
      return true;
    });
  }

  std::vector<Job>& jobs_;
  Ranking ranking_;
  static constexpr helm::StepPolicy kSteps{512, kPlaces, 1, false, 1};
  helm::Scheduler scheduler_{kSteps};
  helm::Snapshot snapshot_;
  helm::Batch batch_;
  std::vector<Job*> waiting_, running_;
  int64_t used_ = 0, broken_ = 0;
  double begun_s_[kKeys][3] = {};
};

int64_t requests_of_a_run() {
  const char* asked = std::getenv("HELM_TEST_LOAD");
  return asked != nullptr ? std::stoll(asked) : helm::test::kFew ? 200 : 800;
}

// Shapes with gaps of one second on average.
std::vector<Shape> shapes_of(const std::string& kind, int64_t count) {
  std::vector<Shape> shapes;
  std::mt19937 random(5);
  if (kind == "poisson" || kind == "bursty") {
    std::exponential_distribution<double> poisson(1);
    std::gamma_distribution<double> bursty(0.25, 4);
    std::lognormal_distribution<double> prompt(6, 1), output(4.8, 0.8);
    for (int64_t i = 0; i < count; ++i) {
      shapes.push_back({kind == "poisson" ? poisson(random) : bursty(random),
                        static_cast<int64_t>(prompt(random)) + 1,
                        static_cast<int64_t>(output(random)) + 1});
    }
    return shapes;
  }
  // The first rows of the trace, for where it is not there.
  std::vector<Shape> rows =
      kind == "code" ? std::vector<Shape>{{0, 4808, 10},   {0.5, 3180, 8}, {1, 110, 27},
                                          {0.1, 7433, 14}, {2, 34, 12},    {0.2, 2034, 10}}
                     : std::vector<Shape>{{0, 374, 44},  {3, 396, 109}, {1, 879, 55},
                                          {0.3, 91, 16}, {0.2, 91, 16}, {1, 1313, 142}};
  if (const char* folder = std::getenv("HELM_TEST_TRACES")) {
    std::ifstream file(std::string(folder) + "/azure_llm_2023_" + kind + ".csv");
    std::string line;
    std::getline(file, line);
    rows.clear();
    double before_s = -1;
    while (std::getline(file, line)) {  // 2023-11-16 18:17:03.9799600,4808,10
      const double at_s = 3600 * std::stod(line.substr(11, 2)) +
                          60 * std::stod(line.substr(14, 2)) + std::stod(line.substr(17));
      const size_t comma = line.find(',');
      const double gap_s = before_s < 0 ? 0 : std::max(0.0, at_s - before_s);
      rows.push_back({gap_s, std::stoll(line.substr(comma + 1)),
                      std::stoll(line.substr(line.find(',', comma + 1) + 1))});
      before_s = at_s;
    }
    REQUIRE(rows.size() > 1000);
  } else {
    MESSAGE("HELM_TEST_TRACES is not set: a few figures stand for the trace ", kind);
  }
  double sum_s = 0;
  for (int64_t i = 0; i < count; ++i) {
    shapes.push_back(rows[static_cast<size_t>(i) % rows.size()]);
    sum_s += shapes.back().gap_s;
  }
  for (Shape& shape : shapes) shape.gap_s *= static_cast<double>(count) / sum_s;
  return shapes;
}

std::vector<Job> jobs_of(const std::vector<Shape>& shapes, double gap_s, bool cancels) {
  std::mt19937 random(7);
  std::vector<Job> jobs;
  double at_s = 0;
  for (const Shape& shape : shapes) {
    at_s += shape.gap_s * gap_s;
    Job job;
    job.place = {std::ssize(jobs), static_cast<int32_t>(random() % 3),
                 static_cast<int64_t>(random() % kKeys), at_s};
    job.prompt = std::clamp<int64_t>(shape.prompt, 1, kContext / 2);
    job.output = std::clamp<int64_t>(shape.output, 1, kContext / 2);
    // Clients seldom say how much they want.
    const int64_t limit = random() % 3 == 0 ? job.output : kContext;
    job.most = std::min(kContext, job.prompt + limit - 1);
    if (cancels && random() % 10 == 0) {
      job.cancel_at = static_cast<int64_t>(random() % static_cast<uint64_t>(job.output));
    }
    jobs.push_back(job);
  }
  return jobs;
}

}  // namespace

TEST_CASE("at any load every request ends once, no block is lost, and nobody is passed over") {
  const int64_t count = requests_of_a_run();
  int64_t parked = 0;
  for (const std::string kind : {"poisson", "bursty", "code", "conv"}) {
    CAPTURE(kind);
    const std::vector<Shape> shapes = shapes_of(kind, count);
    const size_t some = std::min<size_t>(shapes.size(), 500);
    std::vector<Job> closed = jobs_of({shapes.begin(), shapes.begin() + some}, 0, false);
    Machine full(closed);
    full.run(count);
    const double capacity = static_cast<double>(some) / full.now_s_;  // requests per second
    for (const double load : {0.5, 1.0, 2.0}) {
      CAPTURE(load);
      std::vector<Job> jobs = jobs_of(shapes, 1 / (capacity * load), true);
      Machine machine(jobs);
      machine.run(kMostWaiting);
      CHECK(std::all_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.ends == 1; }));
      CHECK(machine.finished_ + machine.cancelled_ + machine.refused_ == count);
      CHECK(machine.cancelled_ > count / 100);
      CHECK(machine.most_idle_ == 0);  // all that decode have a row in each step
      CHECK(machine.most_overtaken_ <= 2 * 3 * kKeys);
      MESSAGE(kind, " ", load, ": refused ", machine.refused_, ", parked ", machine.parked_,
              ", steps ", machine.steps_, ", overtaken ", machine.most_overtaken_);
      parked += machine.parked_;
    }
  }
  CHECK(parked > 0);
}
