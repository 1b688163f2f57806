// Samplers of a step's rows at work on the engine's threads. Knows nothing of requests.
#pragma once

#include <exception>
#include <span>
#include <vector>

#include "helm/engine.h"
#include "serve/sampler.h"

namespace helm {

// A row of logits and what was drawn from it.
struct SampledRow {
  Sampler* sampler = nullptr;
  std::span<const float> logits;  // [vocab]
  Sampler::Draw draw{};
  std::exception_ptr failure{};  // instead of a draw
};

class RowSampler {
 public:
  explicit RowSampler(Engine& engine);

  // While the device is at the step: what each of the rows that come may give.
  void prepare(std::span<Sampler* const> samplers);
  // Draws from all rows; what fails does so for its row alone.
  void draw(std::span<SampledRow> rows);

 private:
  Engine& engine_;
  bool shared_;                            // whether a row is worth a thread
  std::vector<Sampler::Scratch> scratch_;  // by thread
};

}  // namespace helm
