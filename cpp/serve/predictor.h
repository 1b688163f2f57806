// How long steps take in each mode, by the plan's tables, corrected by what steps took. Knows no
// requests, no engine and no clock.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "helm/predictor.h"

namespace helm {

// Decoding rows that lie on one side. Counts are fractions where a mean is asked for.
struct DecodeRows {
  double rows = 0;
  std::vector<double> positions;  // [attention] seen by all of them
};

// What a step computes, as far as its time depends on it.
struct StepLoad {
  DecodeRows near;
  std::array<DecodeRows, 2> far;  // by sub-batch; a joint step has both in its one batch
  double prompt_rows = 0;
  double outputs = 0;                          // rows of logits
  std::vector<double> prompt_s, cpu_prompt_s;  // [attention] of prompts, by device
  std::vector<double> prompt_beside_s;         // the accelerator's while the CPU attends
  double visit_s = 0;                          // of far pages that prompts attend to
};

// Mean tokens of requests, and of a prompt as many as a step takes at once.
struct RequestShape {
  double prompt = 0, output = 0, chunk = 0;
};

// Seconds that a work takes alone, and while the other device works all the time.
struct Work {
  double alone_s = 0, beside_s = 0;
};

class Predictor {
 public:
  explicit Predictor(PredictorTables tables, int64_t page_tokens);

  StepLoad load() const;  // of nothing
  // A row whose sequence has so many positions, or `count` of them; negative: fewer.
  void add(DecodeRows& reads, double length, double count = 1) const;
  // A chunk of a prompt after `past` positions; far: those visit.
  void add_prompt(StepLoad& load, double past, double tokens, bool far, double count = 1) const;

  // Seconds of the step, as the tables have it. Near: without its far rows.
  double seconds(StepMode mode, const StepLoad& load) const;
  // The same as steps of that mode turned out.
  double corrected_s(StepMode mode, double table_s) const { return table_s * correction(mode); }
  double correction(StepMode mode) const { return corrections_[static_cast<size_t>(mode)]; }
  // A step of which the tables say table_s took measured_s. Modes that never ran are taken to be
  // as far off.
  void note(StepMode mode, double table_s, double measured_s);

  // What a split step's accelerator does while the CPU attends for each sub-batch, less what the
  // CPU takes: seconds by which the CPU is hidden; negative: it is not.
  std::array<double, 2> hidden_s(const StepLoad& load) const;
  // Tokens a second while so many requests decode on each side and as many prompts begin as end:
  // some steps have a chunk of a prompt. In the others far rows take part or, if that is better,
  // wait.
  double steady_rate(StepMode mode, double near, double far, const RequestShape& shape) const;

  static constexpr int64_t kMostSkips = 4;          // steps for which a far row is passed over
  static constexpr double kLatest = 0.1;            // weight of the last step in a correction
  static constexpr double kLeast = 0.5, kMost = 2;  // of a correction

 private:
  double at(const std::vector<double>& table, double rows) const;
  double with_cpu_s(const StepLoad& load) const;  // what no mode changes
  Work near(size_t c, const StepLoad& load) const;
  Work far(size_t c, const DecodeRows& far) const;
  Work products(size_t c, double rows) const;
  double joint_s(const StepLoad& load) const;
  double split_s(const StepLoad& load) const;
  double steady_s(StepMode mode, double near, double far, double chunk,
                  const RequestShape& shape) const;

  PredictorTables tables_;
  double layers_ = 0;  // of the accelerator
  double visit_position_s_ = 0;
  std::array<double, kStepModeNames.size()> corrections_;
  std::bitset<kStepModeNames.size()> ran_;
};

}  // namespace helm
