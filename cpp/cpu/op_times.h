// How long the ops of CPU stages take, by kind. Counts only while asked to.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "helm/plan.h"

namespace helm::cpu {

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

 private:
  bool counting_ = false;
  std::array<Kind, kOpKinds> kinds_;
};

}  // namespace helm::cpu
