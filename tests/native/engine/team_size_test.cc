// How many members decode, on machines made of arithmetic: a clock that steps move, and other
// programs that come and go.
#include "engine/team_size.h"

#include <doctest/doctest.h>

#include <functional>
#include <random>

namespace helm::test {
namespace {

struct Step {
  double run_s, lost_s;
};
// What a step of a team of this size takes.
using Machine = std::function<Step(int size)>;

// Two CPUs: two members are faster, unless another program has one of the CPUs for half the time;
// then one member is, which moves to the other CPU.
Step quiet(int size) {
  return {size == 2 ? 0.008 : 0.013, 0};
}
Step beside_one(int size) {
  return size == 2 ? Step{0.020, 0.010} : Step{0.013, 0};
}
// Each CPU has another program.
Step beside_two(int size) {
  return size == 2 ? Step{0.040, 0.040} : Step{0.020, 0.007};
}

class Decoding {
 public:
  explicit Decoding(int members, bool adapts = true) : team_(members, adapts) {}

  const TeamSize& team() const { return team_; }
  int last() const { return last_; }  // size of a step

  // Decodes for so long; the share that it reaches of the rate which `best` members have.
  double share(const Machine& machine, double seconds, int best, int64_t tokens = 1) {
    int steps = 0;
    const double begin_s = now_s_;
    while (now_s_ < begin_s + seconds) {
      last_ = team_.next(tokens, now_s_);
      const Step step = machine(last_);
      now_s_ += step.run_s;
      team_.ran(step.run_s, step.lost_s);
      ++steps;
    }
    return steps * machine(best).run_s / (now_s_ - begin_s);
  }
  void rest(double seconds) { now_s_ += seconds; }

 private:
  TeamSize team_;
  int last_ = 0;
  double now_s_ = 1000;
};

}  // namespace

TEST_CASE("on a quiet machine all members decode, whatever noise there is") {
  Decoding decoding(2);
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform;
  const Machine noisy = [&](int size) {
    Step step = quiet(size);
    step.run_s *= 1 + 0.3 * uniform(random);
    step.lost_s = 0.02 * step.run_s * uniform(random);
    return step;
  };
  for (int i = 0; i < 10000; ++i) {
    decoding.share(noisy, 0.001, 2);  // a step
    REQUIRE(decoding.last() == 2);
  }
}

TEST_CASE("beside busy programs fewer decode, and all again when those have ended") {
  Decoding decoding(2);
  decoding.share(quiet, 10, 2);
  for (const Machine& busy : {Machine(beside_one), Machine(beside_two)}) {
    decoding.share(busy, 1, 1);
    CHECK(decoding.team().size() == 1);
    CHECK(decoding.share(busy, 20, 1) > 0.95);
    CHECK(decoding.team().size() == 1);
    decoding.share(quiet, 1.5, 2);
    CHECK(decoding.team().size() == 2);
    CHECK(decoding.share(quiet, 20, 2) > 0.999);
  }
}

TEST_CASE("a lone busy program costs one member of many") {
  Decoding decoding(16);
  const auto beside = [](int programs) {
    return [programs](int size) {
      const bool shared = size + programs > 16;
      return Step{0.064 / size + 0.002 + (shared ? 0.012 : 0), shared ? 0.006 : 0};
    };
  };
  decoding.share(beside(1), 2, 15);
  CHECK(decoding.team().size() == 15);
  CHECK(decoding.share(beside(1), 20, 15) > 0.95);
  decoding.share(beside(8), 5, 8);
  CHECK(decoding.team().size() == 8);
  decoding.share(beside(4), 10, 12);
  CHECK(decoding.team().size() == 12);
  decoding.share(beside(0), 4, 16);
  CHECK(decoding.team().size() == 16);
}

TEST_CASE("members that lose time stay where fewer are no faster") {
  Decoding decoding(2);
  const Machine large = [](int size) {  // the others help while one has no CPU
    return size == 2 ? Step{0.3, 0.15} : Step{0.5, 0.1};
  };
  decoding.share(large, 30, 2);
  CHECK(decoding.team().size() == 2);
  CHECK(decoding.share(large, 200, 2) > 0.95);
}

TEST_CASE("steps of other numbers of tokens are not compared") {
  Decoding decoding(2);
  for (int i = 0; i < 200; ++i) {
    // Twice the tokens take longer; two members are faster at either.
    decoding.share([](int size) { return Step{size == 2 ? 0.02 : 0.03, 0.01}; }, 0.09, 2, 2);
    decoding.share([](int size) { return Step{size == 2 ? 0.01 : 0.015, 0.005}; }, 0.09, 2, 1);
    REQUIRE(decoding.team().size() == 2);
  }
}

TEST_CASE("after a rest it is soon tried whether others have ended") {
  Decoding decoding(2);
  decoding.share(beside_two, 30, 1);
  CHECK(decoding.team().size() == 1);
  decoding.rest(60);
  decoding.share(quiet, 0.5, 2);
  CHECK(decoding.team().size() == 2);
}

TEST_CASE("a number of threads that was asked for stays") {
  Decoding decoding(2, false);
  decoding.share(beside_one, 10, 1);
  CHECK(decoding.team().size() == 2);
  Decoding alone(1);
  alone.share(beside_two, 10, 1);
  CHECK(alone.team().size() == 1);
}

}  // namespace helm::test
