// What is guessed in a step: a drafter's guesses, as many as pay. Knows no engine.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "helm/generation.h"
#include "helm/speculation.h"
#include "serve/draft_price.h"

namespace helm {

// Since the start.
struct GuessCounts {
  int64_t guessed = 0, accepted = 0;
  double saved_s = 0;
};

class Speculator {
 public:
  // Throws kInvalid for a speculation_obstacle().
  Speculator(const Plan& plan, Speculation speculation);
  bool on() const { return speculation_.drafter != nullptr; }

  // A request of the next step.
  struct Seat {
    RequestId id;
    std::span<const int32_t> tokens;  // prompt and output so far
    std::span<const int32_t> stops;   // behind which nothing is guessed
    int64_t most;                     // guesses, as far as the request goes
    Draft draft;                      // what is guessed
  };
  // rows: of the step, without guesses; all give logits, or one for each seat.
  void guess(std::span<Seat> seats, int64_t rows);

  struct Tried {
    RequestId id;
    int32_t kind;
    int64_t guessed, accepted;
  };
  // What came of a request's guesses in a step that had so many rows without any. Returns the
  // seconds that its tokens would have taken longer in steps without guesses.
  double note(const Tried& tried, int64_t rows, double seconds);
  // Of the last step: its rows with guesses, and seconds from before guess() on.
  void note_step(int64_t rows, double seconds) { price_.note(rows, seconds - drafting_s_); }
  void forget(RequestId id);

  const GuessCounts& counts() const { return counts_; }

 private:
  void cut(Draft& draft, const Seat& seat, int64_t most) const;
  void propose(std::span<Seat> seats, std::span<const DraftAsk> asks);
  std::vector<int64_t> choose(std::span<const DraftOffer> offers, std::span<DraftAsk> asks,
                              int64_t rows, int64_t spare) const;

  Speculation speculation_;
  int64_t vocab_size_, step_tokens_, step_outputs_;
  StepPrice price_;
  Acceptance all_;                       // of all requests
  std::map<RequestId, Acceptance> own_;  // of those that are open
  bool guessing_ = false;                // in the last step
  double drafting_s_ = 0;                // of it, by a drafter that takes time
  GuessCounts counts_;
};

}  // namespace helm
