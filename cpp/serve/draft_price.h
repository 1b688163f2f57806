// What guesses cost and bring: how long steps take by their rows, and how often guesses are right.
// Both are learnt from steps and forgotten again. Knows no engine, no tokens and no clock.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "helm/speculation.h"

namespace helm {

// Seconds of a step of so many rows that all give logits.
class StepPrice {
 public:
  void note(int64_t rows, double seconds);
  // What was measured, in a line between measured ones; what is long ago gives way to a guess from
  // shorter steps, so that it is tried again. 0 before any step.
  double seconds(int64_t rows) const;

  static constexpr double kRowShare = 0.05;    // of a row's step, for a further row never tried
  static constexpr double kHalfLife = 512;     // steps after which half of a measured price counts
  static constexpr double kMostOutlier = 1.5;  // a step that took longer was not the rows' fault

 private:
  struct Measured {
    double seconds = 0;
    int64_t count = 0;
    int64_t step = 0;
  };
  double guess(int64_t rows, double shorter_s, int64_t shorter) const;

  std::map<int64_t, Measured> measured_;
  int64_t step_ = 0;
};

// How often guesses are right, by their kind.
class Acceptance {
 public:
  // Of drafts by this drafter, before any is tried.
  explicit Acceptance(const Drafter* drafter = nullptr);
  // As they were for others, with little weight.
  explicit Acceptance(const Acceptance& others, double weight);

  double rate(int32_t kind) const;  // of one token, in [0, 1)
  void note(int32_t kind, int64_t drafted, int64_t accepted);
  void skip(int32_t kind);  // a draft was not tried: what is known of its kind fades

 private:
  static constexpr double kKept = 0.9, kFaded = 0.995, kWeight = 2;
  struct Kind {
    double expected = 0, tried = 0, right = 0;
  };
  std::array<Kind, Drafter::kKinds> kinds_{};
};

// A request that may have guesses in the next step.
struct DraftOffer {
  double rate = 0;   // at which a guess is right if those before it are
  int64_t most = 0;  // guesses
};

// Seconds that it takes to make so many guesses of each offer.
using DraftSeconds = std::function<double(std::span<const int64_t> guesses)>;

// How many guesses each gets, at most `spare` in all: as many as make the most tokens per second of
// a step that has `rows` rows without them. Longer steps must pay by a share, more so where the
// last step had no guesses. draft_s: empty for guesses that are there already.
std::vector<int64_t> guesses_that_pay(const StepPrice& price, int64_t rows,
                                      std::span<const DraftOffer> offers, int64_t spare,
                                      bool guessing, const DraftSeconds& draft_s = {});

// Tokens that a step brings on average with so many guesses.
double expected_tokens(double rate, int64_t guesses);

}  // namespace helm
