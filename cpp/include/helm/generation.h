// Text generation over an engine: continuous batching of requests, sampling, stop conditions.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "helm/constraint.h"
#include "helm/engine.h"
#include "helm/speculation.h"

namespace helm {

// How the next token is drawn. Applied in this order: repetition penalty (Keskar et al. 2019),
// presence and frequency penalty, logit bias, the request's constraint, temperature, top-k, top-p
// (Holtzman et al. 2020), min-p (Nguyen et al. 2024).
struct SamplingParams {
  float temperature = 0;  // 0: greedy
  int32_t top_k = 0;      // 0: off
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  uint64_t seed = 0;      // the n-th token of a request depends on the seed, n and its logits
  int32_t logprobs = -1;  // -1: none; 0: of the sampled token; n: also of the n most likely
  // Subtracted from the logit of each token that the request has drawn: `presence_penalty` once,
  // `frequency_penalty` for each time. In [-2, 2].
  float presence_penalty = 0;
  float frequency_penalty = 0;
  // Added to a token's logit, in [-100, 100].
  std::vector<std::pair<int32_t, float>> logit_bias = {};
};

struct Request {
  std::vector<int32_t> prompt;  // every token of the context so far
  int64_t cached = 0;           // leading prompt tokens that `sequence` already holds
  SequenceId sequence = -1;     // an open sequence to continue; -1: opened and given back here
  int64_t max_tokens = 128;
  std::vector<int32_t> stop_tokens;
  SamplingParams sampling = {};
  // What the tokens must obey, of this request alone; null: nothing. Tokens that it forces are
  // computed with the one before them and have no log-probability; with `logprobs` all are drawn.
  std::shared_ptr<TokenConstraint> constraint = nullptr;
  // Which of those that wait begins first, and which gives way to others: kBatch to kInteractive. A
  // class that is passed over rises by one with every 30 s.
  int32_t priority = kNormal;
  int64_t key = 0;  // whose request it is: within a class keys take turns by tokens
  // Whether somebody reads its tokens as they come. Prompts are paced beside such requests alone:
  // see Service::pace().
  bool streamed = true;

  static constexpr int32_t kBatch = 0, kNormal = 1, kInteractive = 2, kPriorities = 3;
};

using RequestId = int64_t;

enum class Finish : uint8_t { kNone, kStop, kLength, kError };

struct Token {
  RequestId request;
  int32_t id;                                  // -1 with kError, which brings no token
  float logprob;                               // natural log, NaN unless asked for
  std::vector<std::pair<int32_t, float>> top;  // most likely first
  Finish finish;
};

struct RequestTimings {
  double queue_s = 0;           // waiting for a sequence or a prefix
  double prefill_s = 0;         // from admission to the first token
  int64_t prefill_tokens = 0;   // computed, not found
  double first_token_s = 0;     // from arrival to the first token
  double decode_s = 0;          // from the first token to the last
  int64_t decode_tokens = 0;    // tokens after the first
  int64_t decode_bytes = 0;     // weights and KV read for them
  int64_t guessed_tokens = 0;   // computed on a guess, see helm/speculation.h
  int64_t accepted_tokens = 0;  // of them, those that were right: decode took as many steps less
  double saved_s = 0;           // of decode by that, as far as steps are known; below 0: lost
  int64_t parked = 0;           // times that it gave its room to others, and waited
  int64_t again_tokens = 0;     // computed once more after that
};

class PrefixCache;

// Requests take room for KV as they grow. Where none is left, one of the lowest class, the latest
// of these, is parked: it gives up its sequence, waits before all that have not begun, and goes on
// with the same tokens when it is given room again.
//
// A fixed set of requests, computed in the calling thread; helm::Service takes them at any time and
// computes in a thread of its own. All of a fixed set are waited for, so none of them counts as
// streamed. Requests are named by their place, from 0.
class HELM_API Generation {
 public:
  // Checks every request before the first starts; throws kInvalid, or kCapacity for a prompt that
  // is too long, and nothing has begun. With `prefixes`, which must outlive the generation,
  // requests without a sequence begin with what they share with a kept sequence or with one
  // another, and their sequences are kept when they end; one whose prefix is being computed waits
  // for it, and those behind may overtake it.
  // Guesses of tokens are for this generation alone; kInvalid where there is a
  // speculation_obstacle().
  Generation(Engine& engine, std::vector<Request> requests, PrefixCache* prefixes = nullptr,
             Speculation speculation = {});
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  bool done() const;
  // Runs at least one step and further ones until `seconds` have passed or all requests ended.
  // A request that fails alone ends with Finish::kError, and the others go on. Throws what a step
  // failed with; then again, until all requests are cancelled: none can go on. Where the plan lets
  // steps overlap, some may be on their way at the end: others that step the engine before this has
  // ended get kInvalid.
  std::vector<Token> advance(double seconds);
  // These throw kInvalid for a request that was not given.
  void rethrow(RequestId request) const;  // throws what a request failed with, if it did
  void cancel(RequestId request);         // takes effect at once; an own sequence is given back
  RequestTimings timings(RequestId request) const;

 private:
  class HELM_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace helm
