// The pacer on steps whose time is known: what it lets prompts have, and what tokens wait for.
#include "serve/pacer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

namespace {

using helm::Pacer;

// A step takes fixed_s, and so much for each row of prompts.
struct Machine {
  double fixed_s, row_s;
  double seconds(int64_t rows) const { return fixed_s + row_s * static_cast<double>(rows); }
};

// After some steps without prompts and, with `whole`, a whole prompt alone, a long prompt beside
// decoding rows; the rows it has come to.
int64_t settled(const Machine& machine, Pacer& pacer, bool whole, double noise = 0) {
  std::mt19937 random(5);
  const auto disturbed = [&](double s) {
    return s * (1 + noise * static_cast<double>(random() % 1000) / 1000);
  };
  for (int i = 0; i < 20; ++i) pacer.note(4, 0, disturbed(machine.fixed_s));
  if (whole) pacer.note(0, 512, disturbed(machine.seconds(512)));
  for (int i = 0; i < 60; ++i) {
    const int64_t rows = pacer.rows();
    pacer.note(4, rows, disturbed(machine.seconds(rows)));
  }
  return pacer.rows();
}

}  // namespace

TEST_CASE("a step with a prompt takes 2.5 times one without") {
  const Machine machine{0.08, 0.003};
  for (const bool whole : {false, true}) {
    Pacer pacer(512);
    const int64_t rows = settled(machine, pacer, whole);
    CHECK(machine.seconds(rows) == doctest::Approx(0.2).epsilon(0.05));
  }
  Pacer noisy(512);
  CHECK(machine.seconds(settled(machine, noisy, true, 0.5)) < 0.32);
}

TEST_CASE("a step may take 50 ms, or what is asked for") {
  const Machine machine{0.004, 0.0005};
  Pacer pacer(512);
  CHECK(machine.seconds(settled(machine, pacer, true)) == doctest::Approx(0.05).epsilon(0.05));
  Pacer asked(512);
  asked.aim(0.02);
  CHECK(machine.seconds(settled(machine, asked, true)) == doctest::Approx(0.02).epsilon(0.1));
}

TEST_CASE("where a step costs much however few its rows are, a prompt keeps half of its speed") {
  const Machine machine{1.0, 0.0005};  // weights that visit, decoding takes 0.1 s of it
  Pacer pacer(512);
  for (int i = 0; i < 20; ++i) pacer.note(4, 0, 0.1);
  pacer.note(0, 512, machine.seconds(512));
  for (int i = 0; i < 60; ++i) {
    const int64_t rows = pacer.rows();
    pacer.note(4, rows, machine.seconds(rows));
  }
  const auto rate = [&](int64_t rows) { return static_cast<double>(rows) / machine.seconds(rows); };
  CHECK(rate(pacer.rows()) >= 0.47 * rate(512));
}

TEST_CASE("rows are never fewer than 16 nor more than a step has") {
  Pacer slow(512);
  CHECK(settled({0.1, 1.0}, slow, true) == Pacer::kLeastRows);
  Pacer fast(512);
  CHECK(settled({0.001, 1e-6}, fast, true) == 512);
  Pacer small(8);
  CHECK(small.rows() == 8);
  CHECK(settled({0.1, 1.0}, small, true) == 8);
  Pacer fresh(512);
  CHECK(fresh.rows() == Pacer::kFirstRows);
  fresh.note(1, 0, 0.0);  // a clock that stands
  fresh.note(0, 0, 1.0);
  CHECK(fresh.rows() == Pacer::kFirstRows);
}
