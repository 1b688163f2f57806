// What CPU stages count: how long their ops take, by kind, while asked to; and always the experts
// that steps read.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "helm/plan.h"

namespace helm::cpu {

// Of ops of experts. Runs of one engine's CPU stages do not overlap.
struct ExpertCounts {
  int64_t runs = 0;
  int64_t rows = 0;      // of all runs
  int64_t distinct = 0;  // experts that some row of a run has, of all runs
  double expected = 0;   // how many these would be, each chosen as often as any other
};

class OpTimes {
 public:
  using Clock = std::chrono::steady_clock;

  struct Kind {
    int64_t runs = 0;
    Clock::duration time{};
  };

  bool counting() const { return counting_; }
  // From zero; or stops, keeping what was counted.
  void count(bool on) {
    counting_ = on;
    if (on) kinds_ = {};
  }
  void add(OpKind kind, Clock::duration time) {
    Kind& sum = kinds_[static_cast<size_t>(kind)];
    ++sum.runs;
    sum.time += time;
  }
  const Kind& of(OpKind kind) const { return kinds_[static_cast<size_t>(kind)]; }

  ExpertCounts experts;

 private:
  bool counting_ = false;
  std::array<Kind, kOpKinds> kinds_;
};

}  // namespace helm::cpu
