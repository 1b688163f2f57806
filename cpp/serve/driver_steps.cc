// The driver's steps: what follows is guessed, room is made, steps are submitted and collected, and
// tokens taken.
#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "serve/driver.h"

namespace helm {

void Driver::look() {
  snapshot_.runners.clear();
  const Active* prompt = nullptr;  // that goes on next
  for (const Active* active : table_.running()) {
    const bool running = active->state == Active::State::kRunning;
    snapshot_.runners.push_back(
        {running ? std::ssize(active->pending) : 0, active->decoding(), active->group});
    const Runner& runner = snapshot_.runners.back();
    if (prompt == nullptr && !runner.decoding && runner.pending > 0) prompt = active;
  }
  const bool measures = is_read() && pacer_.measures();
  const int64_t past = prompt == nullptr ? 0 : prompt->held();
  snapshot_.prompt_rows = measures ? 0 : prompt_rows(past, longest_wait_s());
}

// Whether somebody reads tokens of a request that decodes.
bool Driver::is_read() const {
  return std::ranges::any_of(table_.running(), [](const Active* active) {
    return active->request.streamed && active->decoding();
  });
}

// Of prompts that go on behind `past` positions, in a step that decodes for those who have waited.
int64_t Driver::prompt_rows(int64_t past, double waited_s) const {
  if (!is_read()) return engine_.plan().limits.step_tokens;
  return pacer_.rows(past, std::ssize(table_.running()), waited_s);
}

// Of tokens that somebody reads, of requests that were passed over.
double Driver::longest_wait_s() const {
  const double now_s = seconds_of(Clock::now());
  double longest = 0;
  for (const Active* active : table_.running()) {
    if (!active->request.streamed || !active->decoding() || active->skips == 0) continue;
    longest = std::max(longest, now_s - active->last_token_s());
  }
  return longest;
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
    const int64_t positions = active.most - active.held() - row.tokens;
    const int64_t left = active.request.max_tokens - active.generated - 1;
    const bool all = row.output && row.tokens == std::ssize(active.pending);
    seats.push_back({active.id,
                     active.request.prompt,
                     active.request.stop_tokens,
                     all ? std::min(positions, left) : 0,
                     {}});
  }
  speculator_.guess(seats, rows);
  for (size_t i = 0; i < drafts.size(); ++i) {
    drafts[i] = std::move(seats[i].draft);
    Active& active = *table_.running()[batch_.rows[i].runner];
    const int64_t tokens = batch_.rows[i].tokens;
    // Nobody gives way to guesses.
    if (drafts[i].tokens.empty() || room_.grow(active, tokens + std::ssize(drafts[i].tokens))) {
      continue;
    }
    const int64_t left = active.capacity - active.held();
    drafts[i].tokens.resize(static_cast<size_t>(left - tokens));
  }
  return drafts;
}

// Plans the next step and finds room for what it adds to sequences; false if nothing is ready.
bool Driver::choose() {
  settle_sides();
  while (true) {
    scheduler_.plan(snapshot_, batch_);
    const RequestTable::List& running = table_.running();
    for (size_t i = 0; i < running.size(); ++i) running[i]->group = batch_.groups[i];
    snapshot_.next_group = batch_.next_group;
    const auto full = std::find_if(
        batch_.rows.begin(), batch_.rows.end(),
        [&](const BatchRow& row) { return !room_.grow(*running[row.runner], row.tokens); });
    const bool grown = full == batch_.rows.end();
    const bool fits = grown && fits_near() && fits_far();
    if (!fits && !flights_.empty()) return false;  // they end before anyone gives way
    if (!grown) {
      make_way(*running[full->runner]);
    } else if ((fits_near() || make_near()) && (fits_far() || make_far())) {
      if (!batch_.rows.empty()) choose_mode();
      return !batch_.rows.empty();
    }
    look();
  }
}

// Sends off the next step; false if nothing is ready: everything waits for a step on its way.
// alone: none is to be on its way with it.
bool Driver::submit(bool alone) {
  if (engine_.in_flight() > std::ssize(flights_)) {
    fail(ErrorKind::kInvalid, "[generate] the engine is at steps of another generation, which ",
         "must end first");
  }
  const Clock::time_point begun = Clock::now();
  if (!choose()) return false;
  const RequestTable::List& running = table_.running();
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
  engine_.submit(inputs_, choice_.second.size());
  Flight& flight = flights_.emplace_back();
  flight.begun = begun;
  flight.submitted = now;
  flight.alone = alone;
  flight.mode = std::move(choice_);
  for (size_t i = 0; i < batch_.rows.size(); ++i) {
    const BatchRow& row = batch_.rows[i];
    Active& active = *running[row.runner];
    active.guesses = std::ssize(drafts[i].tokens);
    flight.guesses += active.guesses;
    if (active.decoding()) {
      flight.decode_rows += row.tokens;
    } else {
      flight.prompts.add(active.held(), row.tokens);
    }
    const int64_t again = std::clamp<int64_t>(active.computed - active.held(), 0, row.tokens);
    active.timings.again_tokens += again;
    if (active.generated == 0) {
      active.timings.prefill_tokens += row.tokens - again;
      ranking_.charge(active.place.key, row.tokens - again);
    }
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
  const double step_s = seconds_between(std::max(flight.submitted, collected_), now);
  pacer_.note(flight.decode_rows + flight.guesses, flight.prompts, step_s);
  note_mode(flight.mode, step_s);
  collected_ = now;
  const auto vocab = static_cast<size_t>(engine_.plan().vocab_size);
  std::vector<SampledRows> rows;
  std::vector<std::pair<Active*, int32_t>> takers;  // with the kind of guesses
  double gap_s = 0;                                 // between tokens of some near request
  for (const Output& output : flight.outputs) {
    const size_t size = vocab * (1 + output.draft.tokens.size());
    const std::span<const float> own = logits.first(size);
    logits = logits.subspan(size);
    Active* active = table_.find(output.request);
    if (active == nullptr || active->state != Active::State::kRunning) continue;  // cancelled
    rows.push_back({&active->sampler, own, output.draft.tokens});
    takers.emplace_back(active, output.draft.kind);
    if (active->decoding() && !is_far(*active)) gap_s = seconds_of(now) - active->last_token_s();
  }
  if (gap_s > 0) follow(usual_s_, gap_s);
  sampler_.draw(rows);
  for (size_t i = 0; i < rows.size(); ++i) take(*takers[i].first, rows[i]);
  if (speculator_.on() && flight.alone && flight.prompts.rows == 0) {
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
  const int64_t room = active.most - engine_.length(active.sequence);
  active.again = false;
  ranking_.charge(active.place.key, Ranking::kOutputWeight * std::ssize(rows.draws));
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

}  // namespace helm
