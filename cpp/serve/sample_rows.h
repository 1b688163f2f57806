// Samplers of a step's rows at work on the engine's threads. Knows nothing of requests.
#pragma once

#include <exception>
#include <span>
#include <vector>

#include "helm/engine.h"
#include "serve/sampler.h"

namespace helm {

// A request's rows of logits and what was drawn from them: from the first, and from each behind a
// guess that was drawn or follows without a draw.
struct SampledRows {
  Sampler* sampler = nullptr;
  std::span<const float> logits;     // [1 + guesses, vocab]
  std::span<const int32_t> guesses;  // the tokens between the rows
  std::vector<Sampler::Draw> draws{};
  int64_t accepted = 0;          // guesses that were right
  std::exception_ptr failure{};  // instead of a further draw
};

class RowSampler {
 public:
  explicit RowSampler(Engine& engine);

  // While the device is at the step: what each of the rows that come may give.
  void prepare(std::span<Sampler* const> samplers);
  // Draws from the rows of all requests; what fails does so for its request alone.
  void draw(std::span<SampledRows> requests);

 private:
  Engine& engine_;
  bool shared_;                            // whether a row is worth a thread
  std::vector<Sampler::Scratch> scratch_;  // by thread
};

}  // namespace helm
