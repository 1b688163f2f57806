// Guesses by a second, smaller model, on an engine of its own. Knows nothing of the model that
// guesses are for.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "helm/engine.h"
#include "helm/prefix_cache.h"
#include "helm/speculation.h"
#include "serve/draft_price.h"

namespace helm {

class ModelDrafter final : public Drafter {
 public:
  explicit ModelDrafter(std::shared_ptr<Engine> engine);

  Draft propose(int64_t request, std::span<const int32_t> tokens, int64_t most) override;
  std::vector<Draft> propose_all(std::span<const DraftAsk> asks) override;
  void forget(int64_t request) override;
  bool takes_time() const override { return true; }
  double seconds(std::span<const DraftAsk> asks) const override;
  double expected(int32_t) const override { return kExpected; }

  static constexpr double kExpected = 0.7;
  static constexpr int64_t kAhead = 256;  // positions that a sequence has room for beyond its text
  // Rows from which on a step is a prompt's, and steps on which what it took is laid: a text goes
  // on for a while.
  static constexpr int64_t kPrompt = 16, kSteps = 32;

 private:
  struct Text {
    SequenceId sequence = -1;
    std::vector<int32_t> held;  // the tokens that it holds, guesses too
    int64_t used = 0;           // when, by the clock
  };
  // A request's part of the next steps: what of its text is not computed, then guess by guess.
  struct Turn {
    Text* text;
    std::span<const int32_t> pending;
    int64_t most;
    Draft* draft;
    bool waits_for_logits = false;
  };

  Text* text_of(const DraftAsk& ask);
  bool give_room(const Text& text, int64_t capacity);
  bool drop_idle();
  void step(std::span<Turn> turns);

  std::shared_ptr<Engine> engine_;
  PrefixCache prefixes_;
  std::map<int64_t, Text> texts_;  // by request
  StepPrice price_;
  double prompt_token_s_ = 0;
  int64_t clock_ = 0;  // calls of propose_all()
};

}  // namespace helm
