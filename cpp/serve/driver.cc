#include "serve/driver.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "helm/prefix_cache.h"

namespace helm {
namespace {

double seconds_between(std::chrono::steady_clock::time_point from,
                       std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

StepPolicy policy_of(const Engine& engine) {
  const Plan& plan = engine.plan();
  return {plan.limits.step_tokens, plan.limits.step_outputs, plan.schedule.decode_groups,
          plan.schedule.prefill_overlap, engine.steps_ahead()};
}

int64_t blocks_of(const Engine& engine, SequenceId sequence) {
  const int64_t page_tokens = engine.plan().kv.page_tokens;
  return (engine.capacity(sequence) + page_tokens - 1) / page_tokens;
}

}  // namespace

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

Driver::Driver(Engine& engine, PrefixCache* prefixes, Speculation speculation)
    : engine_(engine),
      prefixes_(prefixes),
      sampler_(engine),
      stats_(engine.stats()),
      scheduler_(policy_of(engine)),
      pacer_(engine.plan().limits.step_tokens),
      speculator_(engine.plan(), std::move(speculation)) {
  if (prefixes != nullptr && &prefixes->engine() != &engine) {
    fail(ErrorKind::kInvalid, "[generate] the prefix cache is of another engine; give its own");
  }
}

Driver::~Driver() {
  cancel_all();
}

void Driver::add(std::unique_ptr<Active> request) {
  if (ended()) failure_ = nullptr;
  table_.add(std::move(request));
}

void Driver::cancel(RequestId id) {
  Active* active = table_.find(id);
  if (active == nullptr || active->state == Active::State::kDone) return;
  std::erase_if(tokens_, [&](const Token& token) { return token.request == id; });
  const bool waiting = active->state == Active::State::kWaiting;
  table_.end(*active);
  if (!waiting) release(*active);
}

void Driver::cancel_all() noexcept {
  while (!table_.empty()) {
    const auto& list = table_.running().empty() ? table_.waiting() : table_.running();
    try {
      cancel(list.back()->id);
    } catch (...) {  // its sequence is not there: someone else has closed it
    }
  }
  collect_steps();
}

void Driver::refuse_waiting(const std::exception_ptr& why) {
  while (!table_.waiting().empty()) {
    Active& active = *table_.waiting().back();
    finish_with_error(active, why);
    table_.end(active);
  }
}

void Driver::collect_steps() noexcept {
  while (!flights_.empty()) collect();
}

void Driver::release(Active& active) {
  reserved_blocks_ -= std::exchange(active.blocks, 0);
  speculator_.forget(active.id);
  if (const int64_t guesses = std::exchange(active.guesses, 0); guesses > 0) {
    engine_.truncate(active.sequence, engine_.length(active.sequence) - guesses);
  }
  if (active.request.sequence >= 0) return;
  if (prefixes_ == nullptr) return engine_.close(active.sequence);
  prefixes_->keep(active.sequence, active.request.prompt);
}

// Whether a prompt on its way will soon have more of this one than can be had now. Nobody waits for
// one that came later, so every wait ends.
bool Driver::prefix_is_coming(const Active& waiting) const {
  const Request& request = waiting.request;
  if (prefixes_ == nullptr || request.sequence >= 0) return false;
  int64_t coming = 0;
  for (const Active* other : table_.running()) {
    if (other->id > waiting.id) break;
    if (other->state != Active::State::kRunning || other->request.sequence >= 0) continue;
    if (other->pending.empty() || other->decoding()) continue;  // its prompt is there
    const int64_t shared = common_prefix(other->request.prompt, request.prompt);
    if (shared > engine_.length(other->sequence)) coming = std::max(coming, shared);
  }
  coming = std::min(coming, std::ssize(request.prompt) - 1);
  return coming >= PrefixCache::kLeastShared &&
         coming - prefixes_->find(request.prompt) >= PrefixCache::kLeastShared;
}

// Gives the request a sequence; false if it must wait for room.
bool Driver::open(Active& active, bool alone) {
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
  active.cached = cached;
  active.blocks = blocks_of(engine_, active.sequence);
  reserved_blocks_ += active.blocks;
  return true;
}

// First come, first served: a request that does not fit yet holds back those behind it.
void Driver::admit() {
  for (size_t i = 0; i < table_.waiting().size();) {
    Active& active = *table_.waiting()[i];
    if (prefix_is_coming(active)) {
      ++i;
      continue;
    }
    try {
      if (!open(active, table_.running().empty() && others_ == 0)) return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCapacity) throw;
      finish_with_error(active, std::current_exception());
      table_.end(active);
      continue;
    }
    table_.admit(active);
    active.admitted = Clock::now();
    active.timings.queue_s = seconds_between(active.arrived, active.admitted);
  }
}

void Driver::look() {
  snapshot_.runners.clear();
  snapshot_.prompt_rows = pacer_.rows();
  for (const Active* active : table_.running()) {
    const bool running = active->state == Active::State::kRunning;
    snapshot_.runners.push_back(
        {running ? std::ssize(active->pending) : 0, active->decoding(), active->group});
  }
}

// For each row of the batch what may follow its tokens; no more than positions, tokens and rows are
// left for.
std::vector<Draft> Driver::guess() {
  std::vector<Draft> drafts(batch_.rows.size());
  int64_t rows = 0;
  std::vector<Speculator::Seat> seats;
  for (const BatchRow& row : batch_.rows) {
    const Active& active = *table_.running()[row.runner];
    if (!active.decoding()) return drafts;  // prompts make any further row dear
    rows += row.tokens;
    const int64_t positions =
        engine_.capacity(active.sequence) - engine_.length(active.sequence) - row.tokens;
    const int64_t left = active.request.max_tokens - active.generated - 1;
    const bool all = row.output && row.tokens == std::ssize(active.pending);
    seats.push_back({active.id,
                     active.request.prompt,
                     active.request.stop_tokens,
                     all ? std::min(positions, left) : 0,
                     {}});
  }
  speculator_.guess(seats, rows);
  for (size_t i = 0; i < drafts.size(); ++i) drafts[i] = std::move(seats[i].draft);
  return drafts;
}

// Sends off the next step; false if nothing is ready: everything waits for a step on its way.
// alone: none is to be on its way with it.
bool Driver::submit(bool alone) {
  if (engine_.in_flight() > std::ssize(flights_)) {
    fail(ErrorKind::kInvalid, "[generate] the engine is at steps of another generation, which ",
         "must end first");
  }
  const Clock::time_point begun = Clock::now();
  scheduler_.plan(snapshot_, batch_);
  const RequestTable::List& running = table_.running();
  for (size_t i = 0; i < running.size(); ++i) running[i]->group = batch_.groups[i];
  snapshot_.next_group = batch_.next_group;
  if (batch_.rows.empty()) return false;
  std::vector<Draft> drafts(batch_.rows.size());
  if (alone && speculator_.on()) drafts = guess();
  inputs_.clear();
  std::vector<std::vector<int32_t>> rows(batch_.rows.size());
  for (size_t i = 0; i < batch_.rows.size(); ++i) {
    const BatchRow& row = batch_.rows[i];
    const Active& active = *running[row.runner];
    const auto end = active.pending.begin() + row.tokens;
    rows[i].assign(active.pending.begin(), end);
    rows[i].insert(rows[i].end(), drafts[i].tokens.begin(), drafts[i].tokens.end());
    inputs_.push_back({active.sequence, rows[i],
                       row.output ? StepInput::Outputs::kLast : StepInput::Outputs::kNone,
                       1 + std::ssize(drafts[i].tokens)});
  }
  const Clock::time_point now = Clock::now();
  engine_.submit(inputs_);
  Flight& flight = flights_.emplace_back();
  flight.begun = begun;
  flight.submitted = now;
  flight.alone = alone;
  for (size_t i = 0; i < batch_.rows.size(); ++i) {
    const BatchRow& row = batch_.rows[i];
    Active& active = *running[row.runner];
    active.guesses = std::ssize(drafts[i].tokens);
    flight.guesses += active.guesses;
    (active.decoding() ? flight.decode_rows : flight.prompt_rows) += row.tokens;
    active.timings.prefill_tokens += active.generated == 0 ? row.tokens : 0;
    active.pending.erase(active.pending.begin(), active.pending.begin() + row.tokens);
    if (row.output) flight.outputs.push_back({active.id, std::move(drafts[i])});
  }
  std::vector<Sampler*> samplers;
  for (const Output& output : flight.outputs) {
    samplers.push_back(&table_.find(output.request)->sampler);
  }
  sampler_.prepare(samplers);
  return true;
}

// A failure is kept for step().
void Driver::collect() noexcept try {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  std::span<const float> logits = engine_.collect();
  ++steps_;
  const Clock::time_point now = Clock::now();
  pacer_.note(flight.decode_rows + flight.guesses, flight.prompt_rows,
              seconds_between(std::max(flight.submitted, collected_), now));
  collected_ = now;
  const auto vocab = static_cast<size_t>(engine_.plan().vocab_size);
  std::vector<SampledRows> rows;
  std::vector<std::pair<Active*, int32_t>> takers;  // with the kind of guesses
  for (const Output& output : flight.outputs) {
    const size_t size = vocab * (1 + output.draft.tokens.size());
    const std::span<const float> own = logits.first(size);
    logits = logits.subspan(size);
    Active* active = table_.find(output.request);
    if (active == nullptr || active->state != Active::State::kRunning) continue;  // cancelled
    rows.push_back({&active->sampler, own, output.draft.tokens});
    takers.emplace_back(active, output.draft.kind);
  }
  sampler_.draw(rows);
  for (size_t i = 0; i < rows.size(); ++i) take(*takers[i].first, rows[i]);
  if (speculator_.on() && flight.alone && flight.prompt_rows == 0) {
    const double seconds = seconds_between(flight.begun, Clock::now());
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto& [active, kind] = takers[i];
      const Speculator::Tried tried{active->id, kind, std::ssize(rows[i].guesses),
                                    rows[i].accepted};
      active->timings.saved_s += speculator_.note(tried, flight.decode_rows, seconds);
    }
    speculator_.note_step(flight.decode_rows + flight.guesses, seconds);
  }
  settle();
} catch (...) {
  if (!failure_) failure_ = std::current_exception();
}

// As many steps as may be on their way are sent off, then the oldest is awaited.
bool Driver::step() {
  if (failure_) std::rethrow_exception(failure_);
  admit();
  look();
  const int64_t ahead = scheduler_.ahead(snapshot_);
  // One request that decodes has no other step to overlap with.
  const bool alone = ahead == 1 || (snapshot_.runners.size() == 1 && flights_.empty());
  while (static_cast<int64_t>(flights_.size()) < ahead && submit(alone)) look();
  const bool flies = !flights_.empty();
  if (flies) collect();
  if (failure_) std::rethrow_exception(failure_);
  return flies || has_tokens();
}

void Driver::finish_with_error(Active& active, std::exception_ptr failure) {
  active.failure = std::move(failure);
  tokens_.push_back({active.id, -1, std::numeric_limits<float>::quiet_NaN(), {}, Finish::kError});
}

// Takes the tokens drawn from its rows, and those that must follow, and decides whether the request
// goes on. Of the guesses that were computed, the sequence keeps those that are right; of the
// tokens, those that were no guesses are computed next.
void Driver::take(Active& active, SampledRows& rows) {
  const int64_t wrong = std::exchange(active.guesses, 0) - rows.accepted;
  if (wrong > 0) engine_.truncate(active.sequence, engine_.length(active.sequence) - wrong);
  const Clock::time_point now = Clock::now();
  RequestTimings& timings = active.timings;
  if (rows.draws.empty()) {
  } else if (active.generated == 0) {
    active.first_token = now;
    timings.prefill_s = seconds_between(active.admitted, now);
    timings.first_token_s = seconds_between(active.arrived, now);
  } else {
    timings.decode_s = seconds_between(active.first_token, now);
    timings.decode_bytes +=
        stats_.decode_bytes + stats_.kv_token_bytes * engine_.length(active.sequence);
    timings.guessed_tokens += std::ssize(rows.guesses);
    timings.accepted_tokens += rows.accepted;
  }
  const int64_t room = engine_.capacity(active.sequence) - engine_.length(active.sequence);
  int64_t computed = rows.accepted;
  Finish finish = Finish::kNone;
  for (Sampler::Draw& draw : rows.draws) {
    finish = active.take(draw.id, room, computed-- > 0);
    tokens_.push_back({active.id, draw.id, draw.logprob, std::move(draw.top), finish});
    for (const int32_t id : draw.forced) {
      if (finish != Finish::kNone) break;
      finish = active.take(id, room, computed-- > 0);
      tokens_.push_back({active.id, id, std::numeric_limits<float>::quiet_NaN(), {}, finish});
    }
    if (finish != Finish::kNone) break;
  }
  if (finish == Finish::kNone && rows.failure) {
    active.state = Active::State::kEnding;
    return finish_with_error(active, rows.failure);
  }
  const bool stopped = finish == Finish::kNone && active.sampler.stopped();
  if (stopped) tokens_.back().finish = finish = Finish::kStop;
  if (finish != Finish::kNone) active.state = Active::State::kEnding;
}

// Closes what has ended. Not before all rows of a step are taken: closing may run another step.
void Driver::settle() {
  for (size_t i = 0; i < table_.running().size();) {
    Active& active = *table_.running()[i];
    if (active.state != Active::State::kEnding) {
      ++i;
      continue;
    }
    table_.end(active);
    release(active);
  }
}

}  // namespace helm
