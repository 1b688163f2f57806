// How many rows of prompts may join a step that decodes, so that tokens keep coming while a long
// prompt is computed. Judges by what steps took; knows no engine and no clock.
#pragma once

#include <cstdint>

namespace helm {

class Pacer {
 public:
  // most_rows: of prompts in a step.
  explicit Pacer(int64_t most_rows) : most_rows_(most_rows) {}

  // What a step that decodes may take; 0, as at first: kSlowdown times one without prompts, at
  // least kLeastTarget_s.
  void aim(double target_s) { target_s_ = target_s; }
  // A step took so long.
  void note(int64_t decode_rows, int64_t prompt_rows, double seconds);
  // As many as fit the target. A prompt gets half of the speed that it has alone at least: where a
  // step costs much however few its rows are, many.
  int64_t rows() const;

  static constexpr double kSlowdown = 2.5, kLeastTarget_s = 0.05;
  static constexpr int64_t kLeastRows = 16;
  static constexpr int64_t kFirstRows = 64;  // before a prompt was seen

 private:
  // Sums over steps with prompts, older ones with less weight, for a line: seconds by rows.
  double weight_ = 0, rows_ = 0, seconds_ = 0, rows_squared_ = 0, rows_seconds_ = 0;
  double decode_s_ = 0;  // of a step without prompts, lately
  int64_t most_rows_;
  double target_s_ = 0;
};

}  // namespace helm
