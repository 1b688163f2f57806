// Continuous batching: requests wait in order for a sequence, prefill in chunks beside the decoding
// ones, and leave when they are finished.
#include "helm/generation.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <limits>
#include <optional>
#include <utility>

#include "base/check.h"
#include "helm/prefix_cache.h"
#include "serve/active_request.h"
#include "serve/sample_rows.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

class Generation::Impl : public StepOwner {
 public:
  Impl(Engine& engine, std::vector<Request> requests, PrefixCache* prefixes)
      : engine_(engine),
        prefixes_(prefixes),
        sampler_(engine),
        stats_(engine.stats()),
        start_(Clock::now()) {
    if (prefixes != nullptr && &prefixes->engine() != &engine) {
      fail(ErrorKind::kInvalid, "[generate] the prefix cache is of another engine; give its own");
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      check(requests[i], i);
      for (size_t j = 0; j < i; ++j) {
        if (requests[i].sequence >= 0 && requests[i].sequence == requests[j].sequence) {
          fail(ErrorKind::kInvalid, "[generate] requests ", j, " and ", i,
               " continue the same sequence, ", requests[i].sequence);
        }
      }
    }
    for (Request& request : requests) active_.emplace_back(engine.plan(), std::move(request));
  }
  ~Impl() override {
    for (int32_t i = 0; i < std::ssize(active_); ++i) {
      try {
        cancel(i);
      } catch (...) {  // its sequence is not there: someone else has closed it
      }
    }
    collect_steps();
  }

  bool done() const { return tokens_.empty() && ended(); }

  std::vector<Token> advance(double seconds) {
    const Clock::time_point begin = Clock::now();
    do {
      if (ended()) break;
      if (failure_) std::rethrow_exception(failure_);
      step();
    } while (seconds_between(begin, Clock::now()) < seconds);
    return std::exchange(tokens_, {});
  }

  void collect_steps() noexcept override {
    while (!flights_.empty()) collect();
  }

  void cancel(int32_t request) {
    Active& active = at(request);
    if (active.state == Active::State::kDone) return;
    std::erase_if(tokens_, [&](const Token& token) { return token.request == request; });
    if (std::exchange(active.state, Active::State::kDone) != Active::State::kWaiting) {
      release(active);
    }
  }

  Active& at(int32_t request) {
    if (request >= 0 && request < std::ssize(active_)) return active_[static_cast<size_t>(request)];
    fail(ErrorKind::kInvalid, "[generate] request ", request, " was named; expected 0 to ",
         std::ssize(active_) - 1, ", as they were given");
  }

 private:
  void check(const Request& request, size_t index) const;
  bool prefix_is_coming(const Request& request) const;
  bool open(Active& active, bool alone);
  void admit();
  void release(Active& active);
  bool ended() const {
    return std::all_of(active_.begin(), active_.end(),
                       [](const Active& a) { return a.state == Active::State::kDone; });
  }
  void step();
  int64_t ahead() const;
  std::optional<size_t> ready_group();
  bool plan_step();
  void submit();
  void collect() noexcept;
  void take(Active& active, SampledRow& row);
  void finish_with_error(Active& active, Active::State state, std::exception_ptr failure);
  void settle();

  using Flight = std::vector<size_t>;  // whose logits a submitted step brings, in order

  Engine& engine_;
  PrefixCache* prefixes_;  // or null
  RowSampler sampler_;
  const EngineStats stats_;
  Clock::time_point start_;
  std::vector<Active> active_;
  std::vector<StepInput> inputs_;     // of the step being planned
  std::vector<size_t> input_active_;  // which request each belongs to
  std::deque<Flight> flights_;        // submitted steps, oldest first
  size_t next_group_ = 0;             // of the decoding requests
  std::vector<Token> tokens_;         // drawn and not yet returned
  std::exception_ptr failure_;        // of a step: what it should have brought is lost
};

void Generation::Impl::check(const Request& request, size_t index) const {
  const std::string where = "[generate] request " + std::to_string(index) + ": ";
  const Plan& plan = engine_.plan();
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
      (request.sequence < 0 && request.cached != 0) ||
      (request.sequence >= 0 && engine_.length(request.sequence) != request.cached)) {
    fail(ErrorKind::kInvalid, where, "cached is ", request.cached,
         ", it must be the length of the sequence and less than the prompt's ", prompt, " tokens");
  }
  const int64_t room =
      request.sequence < 0 ? plan.limits.context : engine_.capacity(request.sequence);
  if (prompt > room) {
    fail(ErrorKind::kCapacity, where, "the prompt has ", prompt, " tokens, the ",
         request.sequence < 0 ? "context" : "sequence", " holds ", room,
         "; shorten the prompt or raise the context");
  }
  check_sampling(request.sampling, where);
}

void Generation::Impl::release(Active& active) {
  if (active.request.sequence >= 0) return;
  if (prefixes_ == nullptr) return engine_.close(active.sequence);
  prefixes_->keep(active.sequence, active.request.prompt);
}

// Whether a prompt on its way will soon have more of this one than can be had now.
bool Generation::Impl::prefix_is_coming(const Request& request) const {
  if (prefixes_ == nullptr || request.sequence >= 0) return false;
  int64_t coming = 0;
  for (const Active& other : active_) {
    if (other.state != Active::State::kRunning || other.request.sequence >= 0) continue;
    if (other.pending.empty() || other.decoding()) continue;  // its prompt is there
    const int64_t shared = common_prefix(other.request.prompt, request.prompt);
    if (shared > engine_.length(other.sequence)) coming = std::max(coming, shared);
  }
  coming = std::min(coming, std::ssize(request.prompt) - 1);
  return coming >= PrefixCache::kLeastShared &&
         coming - prefixes_->find(request.prompt) >= PrefixCache::kLeastShared;
}

// Gives the request a sequence; false if it must wait for room.
bool Generation::Impl::open(Active& active, bool alone) {
  const Request& request = active.request;
  const int64_t wanted = capacity_of(request, engine_.plan().limits.context);
  int64_t cached = request.cached;
  // When nothing is running that could make room, let open() say why it cannot.
  if (request.sequence >= 0) {
    active.sequence = request.sequence;
  } else if (prefixes_ == nullptr) {
    if (!alone && !engine_.can_open(wanted)) return false;
    active.sequence = engine_.open(wanted);
  } else {
    const auto opened = alone ? std::optional(prefixes_->open(request.prompt, wanted))
                              : prefixes_->try_open(request.prompt, wanted);
    if (!opened) return false;
    active.sequence = opened->sequence;
    cached = opened->cached;
  }
  active.pending.assign(request.prompt.begin() + cached, request.prompt.end());
  return true;
}

// First come, first served: a request that does not fit yet holds back those behind it.
void Generation::Impl::admit() {
  for (Active& active : active_) {
    if (active.state != Active::State::kWaiting || prefix_is_coming(active.request)) continue;
    const bool alone = std::none_of(active_.begin(), active_.end(), [](const Active& other) {
      return other.state == Active::State::kRunning;
    });
    try {
      if (!open(active, alone)) return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCapacity) throw;
      finish_with_error(active, Active::State::kDone, std::current_exception());
      continue;
    }
    active.state = Active::State::kRunning;
    active.admitted = Clock::now();
    active.timings.queue_s = seconds_between(start_, active.admitted);
  }
}

// The group of decoding requests whose turn it is, all of them back from their last step; none if
// every group is on its way. Groups stay of equal size, so that neither device waits for long.
std::optional<size_t> Generation::Impl::ready_group() {
  const auto groups = static_cast<size_t>(engine_.plan().schedule.decode_groups);
  std::vector<int64_t> members(groups, 0);
  std::vector<bool> ready(groups, true);
  for (const Active& active : active_) {
    if (active.decoding()) ++members[active.group];
  }
  for (Active& active : active_) {
    if (!active.decoding()) continue;
    const auto least =
        static_cast<size_t>(std::min_element(members.begin(), members.end()) - members.begin());
    if (!active.pending.empty() && members[active.group] > members[least] + 1) {
      --members[active.group];
      ++members[active.group = least];
    }
    if (active.pending.empty()) ready[active.group] = false;
  }
  for (size_t i = 0; i < groups; ++i) {
    const size_t group = (next_group_ + i) % groups;
    if (members[group] == 0 || !ready[group]) continue;
    next_group_ = (group + 1) % groups;
    return group;
  }
  return std::nullopt;
}

// The requests of a decoding group take one row each; prompts share what is left of the step in
// order. False if nothing is ready: everything waits for a step on its way.
bool Generation::Impl::plan_step() {
  const Limits& limits = engine_.plan().limits;
  inputs_.clear();
  input_active_.clear();
  auto rows = static_cast<size_t>(limits.step_tokens);
  auto outputs = static_cast<size_t>(limits.step_outputs);
  const std::optional<size_t> group = ready_group();
  for (const bool decoding : {true, false}) {
    for (size_t i = 0; i < active_.size(); ++i) {
      Active& active = active_[i];
      const bool running = active.state == Active::State::kRunning;
      if (!running || active.decoding() != decoding || active.pending.empty() || rows == 0)
        continue;
      if (decoding && active.group != group) continue;
      active.fed = std::min(rows, active.pending.size());
      const bool last = active.fed == active.pending.size();
      if (last && outputs == 0) continue;
      rows -= active.fed;
      outputs -= last ? 1 : 0;
      inputs_.push_back({active.sequence,
                         {active.pending.data(), active.fed},
                         last ? StepInput::Outputs::kLast : StepInput::Outputs::kNone});
      input_active_.push_back(i);
    }
  }
  return !inputs_.empty();
}

void Generation::Impl::submit() {
  engine_.submit(inputs_, this);
  Flight& flight = flights_.emplace_back();
  for (size_t k = 0; k < inputs_.size(); ++k) {
    Active& active = active_[input_active_[k]];
    active.timings.prefill_tokens += active.generated == 0 ? static_cast<int64_t>(active.fed) : 0;
    active.pending.erase(active.pending.begin(),
                         active.pending.begin() + static_cast<int64_t>(active.fed));
    if (inputs_[k].outputs == StepInput::Outputs::kLast) flight.push_back(input_active_[k]);
  }
  std::vector<Sampler*> samplers;
  for (const size_t i : flight) samplers.push_back(&active_[i].sampler);
  sampler_.prepare(samplers);
}

// A failure is kept for advance(): it may be another's step that this one is collected for.
void Generation::Impl::collect() noexcept try {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  const std::span<const float> logits = engine_.collect();
  const auto vocab = static_cast<size_t>(engine_.plan().vocab_size);
  std::vector<SampledRow> rows;
  std::vector<Active*> takers;
  for (size_t row = 0; row < flight.size(); ++row) {
    Active& active = active_[flight[row]];
    if (active.state != Active::State::kRunning) continue;  // cancelled meanwhile
    rows.push_back({&active.sampler, logits.subspan(vocab * row, vocab)});
    takers.push_back(&active);
  }
  sampler_.draw(rows);
  for (size_t i = 0; i < rows.size(); ++i) take(*takers[i], rows[i]);
  settle();
} catch (...) {
  if (!failure_) failure_ = std::current_exception();
}

// How many steps may be on their way: as long as a prompt is, the plan says for prompts.
int64_t Generation::Impl::ahead() const {
  const Schedule& schedule = engine_.plan().schedule;
  const bool prompts = std::any_of(active_.begin(), active_.end(), [](const Active& active) {
    return active.state == Active::State::kRunning && !active.decoding();
  });
  const bool overlaps = prompts ? schedule.prefill_overlap : schedule.decode_groups > 1;
  return overlaps ? engine_.steps_ahead() : 1;
}

// As many steps as may be on their way are sent off, then the oldest is awaited.
void Generation::Impl::step() {
  admit();
  while (static_cast<int64_t>(flights_.size()) < ahead() && plan_step()) submit();
  if (!flights_.empty()) collect();
  if (failure_) std::rethrow_exception(failure_);
}

// The request ends with the failure, which rethrow() gives.
void Generation::Impl::finish_with_error(Active& active, Active::State state,
                                         std::exception_ptr failure) {
  active.failure = std::move(failure);
  active.state = state;
  const auto index = static_cast<int32_t>(&active - active_.data());
  tokens_.push_back({index, -1, std::numeric_limits<float>::quiet_NaN(), {}, Finish::kError});
}

// Takes the token drawn from a row, and those that must follow it, and decides whether the request
// goes on: their keys and values are then computed together.
void Generation::Impl::take(Active& active, SampledRow& row) {
  if (row.failure) return finish_with_error(active, Active::State::kEnding, row.failure);
  const Clock::time_point now = Clock::now();
  RequestTimings& timings = active.timings;
  if (active.generated == 0) {
    active.first_token = now;
    timings.prefill_s = seconds_between(active.admitted, now);
    timings.first_token_s = seconds_between(start_, now);
  } else {
    timings.decode_s = seconds_between(active.first_token, now);
    timings.decode_bytes +=
        stats_.decode_bytes + stats_.kv_token_bytes * engine_.length(active.sequence);
  }
  const auto index = static_cast<int32_t>(&active - active_.data());
  const int64_t room = engine_.capacity(active.sequence) - engine_.length(active.sequence);
  Finish finish = active.take(row.draw.id, room);
  tokens_.push_back({index, row.draw.id, row.draw.logprob, std::move(row.draw.top), finish});
  for (const int32_t id : row.draw.forced) {
    if (finish != Finish::kNone) break;
    finish = active.take(id, room);
    tokens_.push_back({index, id, std::numeric_limits<float>::quiet_NaN(), {}, finish});
  }
  const bool stopped = finish == Finish::kNone && active.sampler.stopped();
  if (stopped) tokens_.back().finish = finish = Finish::kStop;
  if (finish != Finish::kNone) active.state = Active::State::kEnding;
}

// Closes what has ended. Not before all rows of a step are taken: closing may run another step.
void Generation::Impl::settle() {
  for (Active& active : active_) {
    if (active.state != Active::State::kEnding) continue;
    active.state = Active::State::kDone;
    release(active);
  }
}

Generation::Generation(Engine& engine, std::vector<Request> requests, PrefixCache* prefixes)
    : impl_(std::make_unique<Impl>(engine, std::move(requests), prefixes)) {}
Generation::~Generation() = default;

bool Generation::done() const {
  return impl_->done();
}
std::vector<Token> Generation::advance(double seconds) {
  return impl_->advance(seconds);
}
void Generation::cancel(int32_t request) {
  impl_->cancel(request);
}
void Generation::rethrow(int32_t request) const {
  if (const auto& failure = impl_->at(request).failure) std::rethrow_exception(failure);
}
RequestTimings Generation::timings(int32_t request) const {
  return impl_->at(request).timings;
}

}  // namespace helm
