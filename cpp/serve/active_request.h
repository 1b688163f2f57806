// A request, from its arrival to its end. Decides nothing.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <iterator>
#include <utility>
#include <vector>

#include "helm/generation.h"
#include "serve/ranking.h"
#include "serve/sampler.h"

namespace helm {

// Positions that a request may come to hold; the last sampled token is never cached.
inline int64_t capacity_of(const Request& request, int64_t context) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  return request.max_tokens > context - prompt ? context : prompt + request.max_tokens - 1;
}

// A request on its way.
struct Active {
  enum class State : uint8_t { kWaiting, kRunning, kEnding, kDone };

  Active(RequestId number, const Plan& plan, Request spec)
      : id(number),
        request(std::move(spec)),
        most(capacity_of(request, plan.limits.context)),
        sampler(request.sampling, plan.vocab_size, request.prompt, request.constraint) {}

  RequestId id;
  Request request;
  int64_t most;  // positions that it may come to hold
  Sampler sampler;
  State state = State::kWaiting;
  SequenceId sequence = -1;
  std::vector<int32_t> pending;  // tokens not yet submitted: the rest of the prompt or the last
  int64_t guesses = 0;           // tokens of its step on the way that are none of its own yet
  int64_t generated = 0;
  int64_t cached = 0;    // tokens of the prompt that its sequence began with
  size_t group = 0;      // of the decoding requests; the requests of a group share their steps
  int64_t capacity = 0;  // positions that its sequence reserves, while it runs
  int64_t blocks = 0;    // of KV, likewise
  Place place;           // among others
  bool again = false;    // was parked, and has not drawn since
  int64_t moved = 0;     // the driver's step in which its KV changed sides
  int64_t computed = 0;  // positions that it has held
  int64_t skips = 0;     // steps that others had since its last, see ModeRow
  RequestTimings timings;
  std::exception_ptr failure;  // of this request alone

  // Takes a generated token, which is computed next unless it is known already. room: positions
  // that may be added to the sequence.
  Finish take(int32_t token, int64_t room, bool known) {
    timings.decode_tokens += generated == 0 ? 0 : 1;
    ++generated;
    request.prompt.push_back(token);
    if (!known) pending.push_back(token);
    const std::vector<int32_t>& stops = request.stop_tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) return Finish::kStop;
    const bool full = std::ssize(pending) > room;
    return full || generated >= request.max_tokens ? Finish::kLength : Finish::kNone;
  }

  bool decoding() const { return state == State::kRunning && generated > 0 && !again; }
  // Positions that its sequence holds, or will when its steps are back.
  int64_t held() const { return std::ssize(request.prompt) - std::ssize(pending); }
  // When its last token was drawn.
  double last_token_s() const {
    return std::chrono::duration<double>(first_token.time_since_epoch()).count() + timings.decode_s;
  }
  bool own_sequence() const { return request.sequence < 0; }
  std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point admitted;
  std::chrono::steady_clock::time_point first_token;
};

}  // namespace helm
