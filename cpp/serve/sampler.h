// Drawing the next token from one row of logits.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "helm/constraint.h"
#include "helm/generation.h"
#include "serve/logit_row.h"

namespace helm {

// Throws Error{kInvalid}, its message after `where`, for parameters outside their ranges.
void check_sampling(const SamplingParams& params, const std::string& where);

// One request's sampler. The n-th draw depends on the seed, n, the logits, the tokens seen and the
// constraint, and on nothing else: not on the batch, nor on what other requests draw.
class Sampler {
 public:
  // `context`: tokens that the repetition penalty counts as seen. Throws kInvalid for a bias of a
  // token outside the vocabulary.
  Sampler(const SamplingParams& params, int64_t vocab_size, std::span<const int32_t> context,
          std::shared_ptr<TokenConstraint> constraint = nullptr);

  struct Draw {
    int32_t id;
    float logprob;                               // of the unmodified distribution, NaN unless asked
    std::vector<std::pair<int32_t, float>> top;  // likewise, most likely first
    std::vector<int32_t> forced;  // what the constraint says must follow, drawn with it
  };
  // Room for a row that is changed, [vocab]; may serve one sampler after the other.
  using Scratch = std::vector<float>;

  // Throws kInvalid for logits that are not finite, and what the constraint throws.
  Draw draw(std::span<const float> logits, Scratch& scratch);
  Draw draw(std::span<const float> logits) {
    Scratch scratch;
    return draw(logits, scratch);
  }

  // Finds what the next draw may give, which it does itself otherwise. What fails is thrown there.
  void prepare() noexcept;
  bool constrained() const { return constraint_ != nullptr; }
  // Whether the constraint says that nothing may follow.
  bool stopped() const { return constraint_ != nullptr && constraint_->is_stopped(); }

 private:
  bool changes_logits() const;
  std::span<const float> changed(std::span<const float> logits, Scratch& scratch) const;
  void forbid(std::span<float> row) const;
  int32_t choose(std::span<const float> row, Largest top) const;
  int32_t choose_of_all(std::span<const float> row, float most) const;
  int32_t choose_likely(std::span<const float> row, float most) const;
  int32_t choose_of(std::span<const Candidate> candidates, float most) const;
  int32_t choose_of_likeliest(std::vector<Candidate> candidates, double total, float most) const;
  void report(std::span<const float> logits, float most, Draw& draw) const;
  void take(int32_t id);
  double target() const;

  SamplingParams params_;
  int64_t vocab_size_;
  std::shared_ptr<TokenConstraint> constraint_;  // or null
  uint64_t draws_ = 0;
  std::vector<bool> seen_;                       // [vocab], only with a repetition penalty
  std::vector<int32_t> seen_ids_;                // the same as a list
  std::unordered_map<int32_t, int32_t> counts_;  // of drawn tokens, only with a penalty of them
  std::vector<uint32_t> allowed_;                // [ceil(vocab / 32)], with a constraint
  bool prepared_ = false;                        // allowed_ is the next draw's
  std::exception_ptr failure_;                   // of preparing it
};

}  // namespace helm
