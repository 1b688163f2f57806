#include "serve/request_checks.h"

#include "base/check.h"
#include "serve/sampler.h"

namespace helm {

void check_request(const Plan& plan, const Request& request, const std::string& where) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) fail(ErrorKind::kInvalid, where, "the prompt has no tokens");
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= plan.vocab_size) {
      fail(ErrorKind::kInvalid, where, "prompt token ", i, " is ", request.prompt[i],
           ", outside the vocabulary of ", plan.vocab_size);
    }
  }
  if (request.max_tokens < 1) {
    fail(ErrorKind::kInvalid, where, "max_tokens must be at least 1, found ", request.max_tokens);
  }
  if (request.cached < 0 || request.cached >= prompt ||
      (request.sequence < 0 && request.cached != 0)) {
    fail(ErrorKind::kInvalid, where, "cached is ", request.cached,
         ", it must be the length of the sequence and less than the prompt's ", prompt, " tokens");
  }
  if (request.sequence < 0 && prompt > plan.limits.context) {
    fail(ErrorKind::kCapacity, where, "the prompt has ", prompt, " tokens, the context holds ",
         plan.limits.context, "; shorten the prompt or raise the context");
  }
  if (request.priority < 0 || request.priority >= Request::kPriorities) {
    fail(ErrorKind::kInvalid, where, "priority must be 0 (batch), 1 (normal) or 2 (interactive), ",
         "found ", request.priority);
  }
  check_sampling(request.sampling, where);
}

void check_sequence(const Engine& engine, const Request& request, const std::string& where) {
  if (request.sequence < 0) return;
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  if (engine.length(request.sequence) != request.cached) {
    fail(ErrorKind::kInvalid, where, "cached is ", request.cached,
         ", it must be the length of the sequence and less than the prompt's ", prompt, " tokens");
  }
  const int64_t room = engine.capacity(request.sequence);
  if (prompt > room) {
    fail(ErrorKind::kCapacity, where, "the prompt has ", prompt, " tokens, the sequence holds ",
         room, "; shorten the prompt or raise the context");
  }
}

}  // namespace helm
