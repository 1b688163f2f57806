// Which mode a step takes, and which far rows join it: as much progress per second as can be had.
// Pure: a snapshot in, a choice out. Knows no engine and no clock.
//
// Of near, joint and split that one runs whose tokens per second are most; a prompt counts as a
// token by the share of it that the step computes. Where no mode reaches the rate of the last
// steps, each second that a step takes costs the tokens of that rate: else slow steps would take in
// rows that cost more there than elsewhere. Nobody waits for long: a step passes over no far row
// that would have waited at its end for more than kMostWait times the usual time between tokens. A
// row that was passed over kMostSkips times is in the next step, one in each.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "serve/predictor.h"

namespace helm {

// By StepMode.
using ModeSet = std::bitset<kStepModeNames.size()>;
ModeSet executed_modes();
inline bool has(const ModeSet& modes, StepMode mode) {
  return modes.test(static_cast<size_t>(mode));
}

// A row that decodes.
struct ModeRow {
  int64_t length = 0;  // positions of its sequence, with the new one
  bool far = false;
  int64_t skips = 0;    // steps since its last that had others but not it
  double waited_s = 0;  // since its last token
};

// A chunk of a prompt.
struct ModePrompt {
  int64_t past = 0, tokens = 0;
  int64_t whole = 0;    // tokens of all of the prompt
  bool output = false;  // it is the last
  bool far = false;
};

struct ModeSnapshot {
  std::vector<ModeRow> rows;        // in order of arrival
  std::vector<ModePrompt> prompts;  // that the step has, whatever its mode
  int64_t most_rows = 0;            // of the step
  int64_t most_outputs = 0;
  double usual_s = 0;  // between a request's tokens, lately; 0: not known
};

struct ModeChoice {
  StepMode mode = StepMode::kNear;
  // Far rows of the snapshot that take part. Of a split step the latter are the second sub-batch,
  // and everything else is the first.
  std::vector<size_t> far, second;
  double table_s = 0;   // what the tables say that the step takes
  double progress = 0;  // tokens
};

class ModeChooser {
 public:
  // allowed: kNear is always among them.
  ModeChooser(Predictor predictor, ModeSet allowed);

  ModeChoice choose(const ModeSnapshot& snapshot);
  // A step that was chosen took so long.
  void note(const ModeChoice& choice, double measured_s);
  // Steps have this mode where they can, as tests want it; empty: the best.
  void force(std::optional<StepMode> mode) { forced_ = mode; }
  // How many far requests bring most tokens a second beside so many near ones, at most `most`, or
  // as few as bring nearly that; 0: none pays. A prompt that finds no room near begins far while
  // there are fewer.
  int64_t far_requests(int64_t near, int64_t most, const RequestShape& shape) const;
  // The best mode's tokens a second with so many on each side.
  double rate(int64_t near, int64_t far, const RequestShape& shape) const;
  const Predictor& predictor() const { return predictor_; }

  static constexpr int64_t kMostSkips = Predictor::kMostSkips;
  static constexpr double kMostWait = 1;   // and then the step that it is in
  static constexpr double kEnough = 0.99;  // of the most that far requests may bring
  static constexpr double kPays = 0.97;    // near requests alone bring less than that of it
  static constexpr double kStay = 0.995;   // of the best's progress keeps the last step's mode
  static constexpr double kLatest = 0.2;   // weight of the last step in the rate

 private:
  struct Situation;
  ModeChoice joint(const Situation& now, double rate) const;
  ModeChoice split(const Situation& now, double rate) const;
  std::vector<ModeChoice> choices(const Situation& now, double rate) const;
  double seconds(const ModeChoice& choice) const {
    return predictor_.corrected_s(choice.mode, choice.table_s);
  }
  double per_second(const ModeChoice& choice) const;
  double value(const ModeChoice& choice, double rate) const;

  Predictor predictor_;
  double tokens_ = 0, seconds_ = 0;  // of a step, lately, as choices have them
  ModeSet allowed_;
  std::optional<StepMode> forced_;
  StepMode last_ = StepMode::kNear;
};

}  // namespace helm
