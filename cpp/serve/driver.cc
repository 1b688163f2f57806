#include "serve/driver.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"
#include "helm/prefix_cache.h"
#include "plan/stages.h"

namespace helm {
namespace {

StepPolicy policy_of(const Engine& engine) {
  const Plan& plan = engine.plan();
  return {plan.limits.step_tokens, plan.limits.step_outputs, plan.schedule.decode_groups,
          plan.schedule.prefill_overlap, engine.steps_ahead()};
}

}  // namespace

Driver::Driver(Engine& engine, PrefixCache* prefixes, Speculation speculation,
               const RoomPolicy& room)
    : engine_(engine),
      room_(engine, prefixes, room),
      sampler_(engine),
      stats_(engine.stats()),
      scheduler_(policy_of(engine)),
      pacer_(engine.plan().limits.step_tokens, prompts_read_more(engine.plan())),
      speculator_(engine.plan(), std::move(speculation)) {
  const Plan& plan = engine.plan();
  if (plan.predictor && engine.moves()) {
    ModeSet modes = executed_modes();
    modes.set(static_cast<size_t>(StepMode::kSplit), engine.splits());
    modes_.emplace(Predictor(*plan.predictor, plan.kv.page_tokens), modes);
  }
  if (prefixes != nullptr && &prefixes->engine() != &engine) {
    fail(ErrorKind::kInvalid, "[generate] the prefix cache is of another engine; give its own");
  }
}

Driver::~Driver() {
  cancel_all();
}

void Driver::add(std::unique_ptr<Active> request) {
  if (ended()) failure_ = nullptr;
  Active& added = table_.add(std::move(request));
  added.place = {added.id, added.request.priority, added.request.key, seconds_of(added.arrived)};
  ranking_.come(added.place);
}

void Driver::cancel(RequestId id) {
  Active* active = table_.find(id);
  if (active == nullptr || active->state == Active::State::kDone) return;
  std::erase_if(tokens_, [&](const Token& token) { return token.request == id; });
  const bool waiting = active->state == Active::State::kWaiting;
  table_.end(*active);
  waiting ? ranking_.leave(active->place) : release(*active);
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
  const RequestTable::List waiting = table_.waiting();
  for (Active* active : waiting) {
    if (active->place.rank < 0) refuse(*active, why);
  }
}

// Ends one that waits.
void Driver::refuse(Active& active, std::exception_ptr why) {
  finish_with_error(active, std::move(why));
  ranking_.leave(active.place);
  table_.end(active);
}

void Driver::collect_steps() noexcept {
  while (!flights_.empty()) collect();
}

void Driver::release(Active& active) {
  speculator_.forget(active.id);
  ranking_.leave(active.place);
  room_.release(active);
}

// Whoever does not fit yet holds back those behind it.
void Driver::admit() {
  if (table_.waiting().empty()) return;
  const double now_s = seconds_of(Clock::now());
  std::vector<std::pair<Ranking::Turn, Active*>> line;
  for (Active* active : table_.waiting()) {
    line.emplace_back(ranking_.turn(active->place, now_s), active);
  }
  std::make_heap(line.begin(), line.end(), std::greater<>());
  for (; !line.empty(); line.pop_back()) {
    std::pop_heap(line.begin(), line.end(), std::greater<>());
    Active& active = *line.back().second;
    if (room_.prefix_is_coming(active, table_.running())) continue;
    if (!may_begin(active)) return;
    try {
      if (!room_.open(active, table_.running(), nobody_else())) return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCapacity) throw;
      refuse(active, std::current_exception());
      continue;
    }
    table_.admit(active);
    if (active.place.rank < 0) {
      active.admitted = Clock::now();
      active.timings.queue_s = seconds_between(active.arrived, active.admitted);
    }
    ranking_.begin(active.place, now_s);
  }
}

// The request gives its room to others; it goes on where they leave it some.
void Driver::park(Active& active) {
  active.computed = std::max(active.computed, engine_.length(active.sequence));
  ++active.timings.parked;
  ++parked_;
  table_.park(active);
  active.place.since_s = seconds_of(Clock::now());
  active.pending.clear();
  active.skips = 0;
  speculator_.forget(active.id);
  room_.release(active);
}

// A request finds no room to grow, and no step is on its way: that of the least rank gives way.
// What has its sequence from others keeps it.
void Driver::make_way(Active& growing) {
  Active* least = &growing;
  for (Active* active : table_.running()) {
    if (active->own_sequence() && Ranking::yields(active->place, least->place)) least = active;
  }
  if (least != &growing || table_.running().size() > 1 || others_ > 0) return park(*least);
  const Plan& plan = engine_.plan();
  finish_with_error(
      growing, std::make_exception_ptr(
                   Error(ErrorKind::kCapacity,
                         "[generate] no block of KV pages is left for the request, which holds " +
                             std::to_string(engine_.length(growing.sequence)) + " positions; " +
                             std::to_string(plan.kv.blocks) +
                             " blocks are there, others hold them; close their sequences")));
  table_.end(growing);
  release(growing);
}

int64_t Driver::waiting_parked() const {
  return std::count_if(table_.waiting().begin(), table_.waiting().end(),
                       [](const Active* active) { return active->place.rank >= 0; });
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

// Closes what has ended. Not before all rows of a step are taken: closing may run another step.
void Driver::settle() {
  for (size_t i = 0; i < table_.running().size();) {
    Active& active = *table_.running()[i];
    if (active.state != Active::State::kEnding) {
      ++i;
      continue;
    }
    note_end(active);
    table_.end(active);
    release(active);
  }
}

}  // namespace helm
