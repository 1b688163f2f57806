// Tokens that are guessed and computed in one step with the last one. They change no token: each is
// drawn from the model's own logits, with the random number that it has without them, and a guess
// counts where it is the token drawn.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "helm/plan.h"

namespace helm {

class Engine;

// What may follow a text.
struct Draft {
  std::vector<int32_t> tokens;
  int32_t kind = 0;  // drafts of one kind are right about as often; below Drafter::kKinds
};

// What is asked for a request of the next step.
struct DraftAsk {
  int64_t request = 0;
  std::span<const int32_t> tokens;  // its prompt and output
  int64_t most = 0;                 // guesses
};

// Guesses for the requests of one generation or service at a time, whose calls do not overlap.
class HELM_API Drafter {
 public:
  static constexpr int32_t kKinds = 6;

  virtual ~Drafter();
  // At most `most` tokens that may follow `tokens`: a request's prompt and output, which only grow.
  // What it throws ends the step, as what the engine throws does. A guess that is no token of the
  // vocabulary ends the draft before it.
  virtual Draft propose(int64_t request, std::span<const int32_t> tokens, int64_t most) = 0;
  // Likewise for several requests at once, in their order: propose() for each if not overridden.
  virtual std::vector<Draft> propose_all(std::span<const DraftAsk> asks);
  virtual void forget(int64_t request);  // it has ended; does nothing if not overridden
  // Whether guesses take a time that counts, as those of a model do; no if not overridden. If so,
  // no more are asked for than pay, and all drafts are of kind 0.
  virtual bool takes_time() const;
  // Seconds that propose_all() would take by what was measured; 0: not known.
  virtual double seconds(std::span<const DraftAsk> asks) const;
  // How often drafts of a kind are right, token by token, before any was tried; in [0, 1].
  virtual double expected(int32_t kind) const;
};

// Guesses that a text goes on as it did before: after the longest run of at least two tokens that
// its end repeats, the latest of several (prompt lookup; Saxena 2023, Yang et al. 2023).
HELM_API std::shared_ptr<Drafter> ngram_drafter();

// Guesses what a model with the same vocabulary, a smaller one, finds likeliest (Leviathan et al.
// 2023, Chen et al. 2023). The engine is the drafter's alone from now on. What it computed is kept
// by request, and for later prompts that begin alike. Beyond the engine's context, its vocabulary
// and the room of its KV pages nothing is guessed. Throws kInvalid where there is no engine.
HELM_API std::shared_ptr<Drafter> model_drafter(std::shared_ptr<Engine> engine);

struct Speculation {
  std::shared_ptr<Drafter> drafter = nullptr;  // null: nothing is guessed
  // Guesses per step and request, as far as there is room; 0: as many as pay, by what steps took
  // and how often guesses were right.
  int64_t tokens = 0;
};

// Why an engine of this plan cannot compute guesses with the same tokens as without; empty: it can.
HELM_API std::string speculation_obstacle(const Plan& plan);

}  // namespace helm
