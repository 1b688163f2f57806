// How many members of the team decode. A member that shares its CPU with another program makes all
// others wait, so beside busy programs fewer are faster; when those have ended, all are again.
// Knows nothing of threads: it is told how long steps took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace helm {

class TeamSize {
 public:
  // Of `most` members; without `adapts` always as many.
  TeamSize(int most, bool adapts);

  // Members for the next step, of so many tokens, that begins at `now_s` of any clock.
  int next(int64_t tokens, double now_s);
  // What the step took for which next() was asked last, and in how much of that members had no CPU.
  void ran(double run_s, double lost_s);

  // The size that is best so far.
  int size() const { return sizes_[best_]; }

 private:
  // Steps at the best size, the latest count most.
  struct Recent {
    double steps = 0, run_s = 0, lost_s = 0;
    void add(double step_run_s, double step_lost_s);
    double step_s() const { return run_s / steps; }
  };
  // Steps at another size, to see if it is better.
  struct Trial {
    size_t at = 0;
    int steps = 0;  // still to come
    int done = 0;
    double limit_s = 0, run_s = 0;  // mean step to stay below, and the steps done
  };

  bool trying() const { return trial_.steps > 0; }
  bool losing() const;
  bool trial_is_due();
  void begin_trial();
  void end_trial(bool better);

  std::vector<int> sizes_;  // ascending
  size_t best_;
  int64_t tokens_ = 0;
  Recent recent_;
  Trial trial_;
  size_t turn_ = 0;                 // of the sizes to try
  double now_s_ = 0, tried_s_ = 0;  // the present step and the last trial
  double tried_step_s_ = 0;         // a step before that
  double interval_s_;               // from one trial to the next
};

}  // namespace helm
