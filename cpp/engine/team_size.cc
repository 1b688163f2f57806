#include "engine/team_size.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace helm {
namespace {

// The system deals CPUs in slices of milliseconds: a mean over less time says little.
constexpr double kRecentS = 0.15;
constexpr double kTrialS = 0.1;
constexpr int kLeastTrialSteps = 2;
// From trial to trial, doubled while they bring nothing up to a time of which they take little.
// While no member loses time, others may have ended: the team is whole again in a good second.
constexpr double kLeastIntervalS = 0.1;
constexpr double kQuietIntervalS = 1.0;
constexpr double kMostIntervalS = 4.0;
constexpr double kTrialShare = 0.05;
// Of one member's time: less is lost on a quiet machine too, and no reason to try fewer members.
constexpr double kLostShare = 0.2;
// So much shorter must the steps of a trial be.
constexpr double kBetter = 0.95;
// Steps that take so much longer than at the last trial: others have begun.
constexpr double kWorse = 1.25;

// All, all but a few, then halves: busy programs mostly are few, and where memory is what decode
// waits for, half the members are nearly as fast as all.
std::vector<int> sizes_up_to(int most) {
  std::set<int> sizes{most};
  for (int less = 1; less < most; less *= 2) sizes.insert({most - less, less});
  return {sizes.begin(), sizes.end()};
}

}  // namespace

TeamSize::TeamSize(int most, bool adapts)
    : sizes_(adapts ? sizes_up_to(most) : std::vector<int>{most}),
      best_(sizes_.size() - 1),
      interval_s_(kLeastIntervalS) {}

void TeamSize::Recent::add(double step_run_s, double step_lost_s) {
  const double kept = std::exp(-step_run_s / kRecentS);
  steps = steps * kept + 1;
  run_s = run_s * kept + step_run_s;
  lost_s = lost_s * kept + step_lost_s;
}

int TeamSize::next(int64_t tokens, double now_s) {
  if (sizes_.size() == 1) return sizes_.front();
  now_s_ = now_s;
  if (tokens != tokens_) {  // steps that cannot be compared
    tokens_ = tokens;
    recent_ = {};
    trial_ = {};
  }
  if (!trying() && trial_is_due()) begin_trial();
  return sizes_[trying() ? trial_.at : best_];
}

bool TeamSize::losing() const {
  return recent_.lost_s > kLostShare * recent_.run_s;
}

bool TeamSize::trial_is_due() {
  if (recent_.run_s < kTrialS / 2) return false;
  const bool worse = recent_.step_s() > kWorse * tried_step_s_;
  if (best_ > 0 && losing() && worse) interval_s_ = kLeastIntervalS;
  const double most_s = std::max(kLeastTrialSteps * recent_.step_s() / kTrialShare,
                                 losing() ? kMostIntervalS : kQuietIntervalS);
  return now_s_ >= tried_s_ + std::min(interval_s_, most_s);
}

void TeamSize::begin_trial() {
  std::vector<size_t> others;
  for (size_t i = sizes_.size(); i-- > 0;) {
    if (i > best_ || (i < best_ && losing())) others.push_back(i);
  }
  if (others.empty()) return;
  tried_step_s_ = recent_.step_s();
  trial_ = {};
  trial_.at = others[turn_++ % others.size()];
  trial_.limit_s = tried_step_s_;
  trial_.steps = std::max(kLeastTrialSteps, static_cast<int>(kTrialS / trial_.limit_s));
}

void TeamSize::ran(double run_s, double lost_s) {
  if (sizes_.size() == 1) return;
  if (!trying()) {
    recent_.add(run_s, lost_s);
    return;
  }
  trial_.run_s += run_s;
  ++trial_.done;
  if (trial_.run_s > (trial_.done + 1) * trial_.limit_s) {
    end_trial(false);  // no longer than it takes to see that
  } else if (--trial_.steps == 0) {
    end_trial(trial_.run_s < kBetter * trial_.done * trial_.limit_s);
  }
}

void TeamSize::end_trial(bool better) {
  if (better) {
    best_ = trial_.at;
    recent_ = {};
    interval_s_ = kLeastIntervalS;
    turn_ = 0;
  } else {
    interval_s_ *= 2;
  }
  tried_s_ = now_s_;
  trial_ = {};
}

}  // namespace helm
