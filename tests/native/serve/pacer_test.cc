// The pacer on steps whose time is known: what it lets prompts have, and what tokens wait for.
#include "serve/pacer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace {

using helm::Pacer;
using helm::PromptWork;

// A step takes fixed_s, and so much for each row of prompts, each pair, and each position that a
// chunk attends to, however few its rows are.
struct Machine {
  double fixed_s, row_s;
  double pair_s = 0, position_s = 0;

  double seconds(int64_t past, int64_t rows) const {
    const auto all = static_cast<double>(past + rows);
    const double pairs = static_cast<double>(rows) * (static_cast<double>(past) + all) / 2;
    return fixed_s + row_s * static_cast<double>(rows) + pair_s * pairs + position_s * all;
  }
  double seconds(int64_t rows) const { return fixed_s + row_s * static_cast<double>(rows); }
};

// Steps of a machine on a clock of its own, as a pacer sees them.
class Clock {
 public:
  Clock(const Machine& machine, Pacer& pacer, double noise = 0)
      : machine_(machine), pacer_(pacer), noise_(noise) {}

  void decode(int64_t steps) {
    while (steps-- > 0) pacer_.note(4, {}, disturbed(machine_.fixed_s));
  }
  // A chunk of a prompt; its seconds.
  double chunk(int64_t decoding, int64_t past, int64_t rows) {
    PromptWork work;
    work.add(past, rows);
    const double seconds = disturbed(machine_.seconds(past, rows));
    pacer_.note(decoding, work, seconds);
    return seconds;
  }
  // Chunks of a prompt from its begin to its end, and the seconds of each. decoding: rows beside
  // it, so that the pacer says how long chunks are.
  std::vector<double> prompt(int64_t decoding, int64_t tokens, int64_t most) {
    std::vector<double> found;
    for (int64_t past = 0; past < tokens;) {
      const int64_t rows =
          std::min(tokens - past, decoding > 0 ? pacer_.rows(past, decoding) : most);
      found.push_back(chunk(decoding, past, rows));
      past += rows;
    }
    return found;
  }

 private:
  double disturbed(double seconds) {
    return seconds * (1 + noise_ * static_cast<double>(random_() % 1000) / 1000);
  }

  const Machine& machine_;
  Pacer& pacer_;
  double noise_;
  std::mt19937 random_{5};
};

// After some steps without prompts and, with `whole`, a whole prompt alone, many chunks beside
// decoding rows; the rows they have come to.
int64_t settled(const Machine& machine, Pacer& pacer, bool whole, double noise = 0) {
  Clock clock(machine, pacer, noise);
  clock.decode(20);
  if (whole) clock.chunk(0, 0, 512);
  for (int i = 0; i < 60; ++i) clock.chunk(4, 0, pacer.rows(0, 4));
  return pacer.rows(0, 4);
}

double sum(const std::vector<double>& seconds) {
  double sum = 0;
  for (const double s : seconds) sum += s;
  return sum;
}

}  // namespace

TEST_CASE("a step with a prompt takes 2.25 times one without") {
  const Machine machine{0.08, 0.003};
  for (const bool whole : {false, true}) {
    Pacer pacer(512);
    const int64_t rows = settled(machine, pacer, whole);
    CHECK(machine.seconds(rows) == doctest::Approx(0.18).epsilon(0.05));
  }
  // Fewer for tokens that have waited.
  Pacer late(512, false);
  settled(machine, late, true);
  CHECK(machine.seconds(late.rows(0, 4, 0.06)) == doctest::Approx(0.12).epsilon(0.05));
  CHECK(late.rows(0, 4, 1) == Pacer::kLeastRows);
  // One step without prompts that was disturbed changes little.
  Pacer calm(512, false);
  const double usual_s = machine.seconds(settled(machine, calm, true));
  Clock steps(machine, calm);
  steps.decode(40);
  for (int64_t i = 0; i < Pacer::kMostUnlike; ++i) steps.chunk(4, 0, calm.rows(0, 4));
  calm.note(4, {}, 2 * machine.fixed_s);
  CHECK(machine.seconds(calm.rows(0, 4)) < 1.2 * usual_s);
  // Fewer rows where steps take unlike times, so that the slowest take no longer.
  Pacer noisy(512, false);
  settled(machine, noisy, true, 0.5);
  Clock clock(machine, noisy, 0.5);
  std::vector<double> chunks;
  for (int i = 0; i < 400; ++i) {
    clock.decode(1);
    chunks.push_back(clock.chunk(4, 0, noisy.rows(0, 4)));
  }
  std::sort(chunks.begin(), chunks.end());
  const double mean_s = 1.25 * machine.fixed_s;  // of a step without prompts
  CHECK(chunks[396] < 2.5 * mean_s);
  CHECK(chunks[200] > 1.5 * mean_s);
  MESSAGE("chunks take ", chunks[200] / mean_s, ", the slowest ", chunks[396] / mean_s, " steps");
}

TEST_CASE("a step may take 50 ms, or what is asked for") {
  const Machine machine{0.004, 0.0005};
  Pacer pacer(512);
  CHECK(machine.seconds(settled(machine, pacer, true)) == doctest::Approx(0.05).epsilon(0.05));
  Pacer asked(512);
  asked.aim(0.02);
  CHECK(machine.seconds(settled(machine, asked, true)) == doctest::Approx(0.02).epsilon(0.1));
}

TEST_CASE("a long prompt's chunks become shorter as its attention grows") {
  // A row behind 4,000 positions takes three times what the first one takes, or twice, and a chunk
  // as long as a quarter of a step without prompts besides.
  for (const Machine& machine :
       {Machine{0.05, 0.004, 2e-6, 0}, Machine{0.05, 0.004, 1e-6, 0.0125 / 4000}}) {
    CAPTURE(machine.position_s);
    for (const bool known : {false, true}) {  // prompts of that length, alone
      for (const double noise : {0.0, 0.2}) {
        CAPTURE(known);
        CAPTURE(noise);
        Pacer pacer(512);
        Clock clock(machine, pacer, noise);
        if (known) clock.prompt(0, 4000, 512);
        clock.decode(20);
        clock.chunk(4, 0, 64);
        clock.decode(20);
        const std::vector<double> chunks = clock.prompt(4, 4000, 512);
        const double bound_s = 2.5 * machine.fixed_s * (1 + noise);
        const auto longer = std::count_if(chunks.begin(), chunks.end(),
                                          [&](double seconds) { return seconds > bound_s; });
        CHECK(longer <= std::ssize(chunks) / 50 + 1);
        Pacer nobody(512);
        const double alone_s = sum(Clock(machine, nobody).prompt(0, 4000, 512));
        CHECK(sum(chunks) < 2.2 * alone_s * (1 + noise / 2));
        MESSAGE(chunks.size(), " chunks, ", sum(chunks) / alone_s, " times the seconds alone, ",
                *std::max_element(chunks.begin(), chunks.end()) / machine.fixed_s);
      }
    }
  }
}

TEST_CASE("where a step costs much however few its rows are, a prompt keeps half of its speed") {
  const Machine machine{1.0, 0.0005};  // weights that visit, decoding takes 0.1 s of it
  Pacer pacer(512);
  for (int i = 0; i < 20; ++i) pacer.note(4, {}, 0.1);
  Clock clock(machine, pacer);
  clock.chunk(0, 0, 512);
  for (int i = 0; i < 60; ++i) clock.chunk(4, 0, pacer.rows(0, 4));
  const auto rate = [&](int64_t rows) { return static_cast<double>(rows) / machine.seconds(rows); };
  CHECK(rate(pacer.rows(0, 4)) >= 0.47 * rate(512));
}

TEST_CASE("where prompts read no more weights, a machine whose speed changes has no longer steps") {
  // Prompts alone while it is fast, beside others while it is slow, as if each step cost much.
  const Machine fast{0.2, 0.004}, slow{0.6, 0.012};
  const auto longest = [&](bool reads_more) {
    Pacer pacer(512, reads_more);
    double most = 0;
    for (int phase = 0; phase < 20; ++phase) {
      Clock(fast, pacer).chunk(0, 0, 512);
      Clock clock(slow, pacer, 0.2);
      clock.decode(20);
      for (int i = 0; i < 4; ++i) {
        const double chunk_s = clock.chunk(4, 0, pacer.rows(0, 4));
        if (phase >= 10) most = std::max(most, chunk_s);
      }
    }
    return most / slow.fixed_s;
  };
  CHECK(longest(true) > 4);
  CHECK(longest(false) < 3);
  MESSAGE(longest(true), ", ", longest(false), " times a step without prompts");
}

TEST_CASE("where prompts keep coming, requests decode") {
  // Eight requests at once, each followed by another. Steps without prompts take one time and more
  // for each row, those of prompts too, all of it up to `noise` more or less.
  struct Load {
    int64_t prompt, output;
    double step_s, row_s, prompt_row_s, noise;
    int64_t decoding;  // more than so many
  };
  constexpr int64_t kAtOnce = 8, kMost = 512;
  for (const Load& load : {Load{256, 128, 0.04, 0.0075, 0.002, 0.1, 6},
                           // Arithmetic bounds it, and prompts have twice as many rows as tokens.
                           Load{130, 68, 0.06, 0.025, 0.02, 0.5, 3}}) {
    CAPTURE(load.prompt);
    const double full_s = load.step_s + load.row_s * kAtOnce;
    Pacer pacer(kMost, false);
    struct Job {
      int64_t computed = 0, drawn = 0;
    };
    std::vector<Job> jobs(kAtOnce);
    std::mt19937 random(7);
    int64_t decoding = 0, steps = 0, longer = 0, without = 0;
    double all_s = 0;
    for (int step = 0; step < 3000; ++step) {
      const int64_t rows =
          std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return job.drawn > 0; });
      const auto next = std::min_element(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) {
        return std::pair(a.drawn > 0, -a.computed) < std::pair(b.drawn > 0, -b.computed);
      });
      int64_t left = kMost;
      if (rows > 0) left = pacer.measures() ? 0 : pacer.rows(next->computed, kAtOnce);
      const bool asked = next->drawn == 0;
      PromptWork work;
      for (Job& job : jobs) {
        if (job.drawn > 0) {
          ++job.drawn;
          continue;
        }
        const int64_t tokens = std::min(left, load.prompt - job.computed);
        if (tokens == 0) continue;
        work.add(job.computed, tokens);
        left -= tokens;
        job.computed += tokens;
        if (job.computed == load.prompt) job.drawn = 1;
      }
      for (Job& job : jobs) {
        if (job.drawn == load.output) job = {};
      }
      double seconds = load.step_s + load.row_s * static_cast<double>(rows) +
                       load.prompt_row_s * static_cast<double>(work.rows);
      const double off = static_cast<double>(random() % 1000) / 500 - 1;
      seconds *= 1 + load.noise * off;
      pacer.note(rows, work, seconds);
      if (step < 500) continue;
      ++steps;
      all_s += seconds;
      decoding += rows;
      longer += rows > 0 && seconds > 2.5 * full_s;
      without += asked && work.rows == 0;
    }
    CHECK(decoding > load.decoding * steps);
    CHECK(longer * 50 <= steps);
    CHECK(without * 9 <= steps);
    const double mean = static_cast<double>(decoding) / static_cast<double>(steps);
    MESSAGE(mean, " of ", kAtOnce, " decode, ", static_cast<double>(decoding) / all_s,
            " tokens/s; of ", steps, " steps ", longer, " are longer, ", without, " measure");
  }
}

TEST_CASE("rows are never fewer than a few nor more than a step has") {
  Pacer slow(512);
  CHECK(settled({0.1, 1.0}, slow, true) == Pacer::kLeastRows);
  Pacer fast(512);
  CHECK(settled({0.001, 1e-6}, fast, true) == 512);
  Pacer small(2);
  CHECK(small.rows(0, 4) == 2);
  CHECK(settled({0.1, 1.0}, small, true) == 2);
  Pacer fresh(512);
  CHECK(fresh.rows(0, 4) == Pacer::kFirstRows);
  fresh.note(1, {}, 0.0);  // a clock that stands
  fresh.note(0, {}, 1.0);
  CHECK(fresh.rows(0, 4) == Pacer::kFirstRows);
}
