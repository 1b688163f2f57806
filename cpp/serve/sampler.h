// Drawing the next token from one row of logits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helm/generation.h"

namespace helm {

// Throws Error{kInvalid}, its message after `where`, for parameters outside their ranges.
void check_sampling(const SamplingParams& params, const std::string& where);

// One request's sampler. The n-th draw depends on the seed, n, the logits and the tokens seen, and
// on nothing else: not on the batch, nor on what other requests draw.
class Sampler {
 public:
  // `context`: tokens that the repetition penalty counts as seen.
  Sampler(const SamplingParams& params, int64_t vocab_size, std::span<const int32_t> context);

  struct Draw {
    int32_t id;
    float logprob;                               // of the unmodified distribution, NaN unless asked
    std::vector<std::pair<int32_t, float>> top;  // likewise, most likely first
  };
  Draw draw(std::span<const float> logits);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  int32_t choose();
  void penalise();
  void keep_top_k();
  int32_t sample();

  SamplingParams params_;
  uint64_t draws_ = 0;
  std::vector<bool> seen_;             // [vocab], only with a repetition penalty
  std::vector<int32_t> seen_ids_;      // the same as a list
  std::vector<Candidate> candidates_;  // scratch, [vocab]
};

}  // namespace helm
