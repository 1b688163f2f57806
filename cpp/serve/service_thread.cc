// The engine's thread: takes what was submitted, steps the driver, fills the outboxes, sleeps.
#include <map>
#include <mutex>
#include <utility>

#include "serve/outbox.h"
#include "serve/service_impl.h"

namespace helm {

// What the engine's thread waits for, if nobody has the turn or is to have it next.
bool Service::Impl::engine_may_go() const {
  if (lent_ || gone_) return false;
  const bool work = (busy_ && !stalled_) || (!inbox_.empty() && !gathers_);
  return quit_ || (work && (tickets_ == served_ || step_first_));
}

void Service::Impl::run() noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    if (!engine_may_go()) {
      parked_ = true;
      turn_.notify_all();
      wake_.wait(lock, [this] { return engine_may_go(); });
      parked_ = false;
    }
    if (quit_) break;
    lock.unlock();
    step();
    lock.lock();
    step_first_ = false;
  }
  gone_ = parked_ = true;
  ended_.notify_all();
  turn_.notify_all();
}

// Notes what was submitted and cancelled, in order.
void Service::Impl::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(inbox_);
    busy_ = busy_ || !commands.empty();  // until publish() counts: who stops waits for these
  }
  for (Command& command : commands) {
    if (command.request != nullptr) {
      outboxes_.emplace(command.id, std::move(command.outbox));
      driver_->add(std::move(command.request));
      continue;
    }
    const auto it = outboxes_.find(command.id);
    if (it == outboxes_.end()) continue;  // it has ended
    const std::shared_ptr<Outbox> outbox = std::move(it->second);
    outboxes_.erase(it);
    try {
      driver_->cancel(command.id);
    } catch (...) {  // its sequence is lost with the device
    }
    driver_->forget(command.id);
    outbox->impl_->closed();
  }
}

void Service::Impl::step() noexcept try {
  take_commands();
  const bool stalled = !driver_->ended() && !driver_->step();
  deliver();
  const std::lock_guard lock(mutex_);
  stalled_ = stalled;
} catch (...) {
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
  }
  end_all(std::current_exception());
}

// Gives every outbox what the step brought it, at once; by then stats() knows of it.
void Service::Impl::deliver() {
  std::map<Outbox*, std::pair<std::shared_ptr<Outbox>, std::vector<Event>>> filled;
  for (Token& token : driver_->take_tokens()) {
    const RequestId id = token.request;
    const auto it = outboxes_.find(id);
    const Active* active = driver_->table().find(id);
    if (it == outboxes_.end() || active == nullptr) continue;
    tokens_ += token.finish == Finish::kError ? 0 : 1;
    const bool last = token.finish != Finish::kNone;
    auto& [outbox, events] = filled[it->second.get()];
    outbox = it->second;
    events.push_back({std::move(token), active->timings, active->cached, active->failure});
    if (!last) continue;
    outboxes_.erase(it);
    driver_->forget(id);
  }
  publish();
  for (auto& [key, batch] : filled) batch.first->impl_->put(std::move(batch.second));
}

// The step's failure, or the service's end, is everyone's.
void Service::Impl::end_all(const std::exception_ptr& why) noexcept {
  try {
    deliver();
  } catch (...) {  // no memory is left for it
  }
  driver_->cancel_all();
  driver_->take_tokens();
  publish();
  for (auto& [id, outbox] : outboxes_) {
    Event event{{id, -1, 0, {}, Finish::kError}, {}, 0, why};
    if (const Active* active = driver_->table().find(id)) event.timings = active->timings;
    driver_->forget(id);
    std::vector<Event> events;
    events.push_back(std::move(event));
    outbox->impl_->put(std::move(events));
  }
  outboxes_.clear();
}

void Service::Impl::publish() {
  const std::lock_guard lock(mutex_);
  const RequestTable& table = driver_->table();
  const int64_t open = std::ssize(table.running()) + std::ssize(table.waiting());
  if (open < stats_.running + stats_.waiting || open == 0) {
    ++ends_;
    ended_.notify_all();
  }
  busy_ = open > 0;
  stats_.running = std::ssize(table.running());
  stats_.waiting = std::ssize(table.waiting());
  stats_.steps = driver_->steps();
  stats_.tokens = tokens_;
  const GuessCounts& guesses = driver_->guesses();
  stats_.guessed_tokens = guesses.guessed;
  stats_.accepted_tokens = guesses.accepted;
  stats_.saved_s = guesses.saved_s;
  stats_.kv_blocks_used = driver_->reserved_blocks();
  stats_.parked = driver_->waiting_parked();
  stats_.preemptions = driver_->preemptions();
  const FarUse far = engine_->far_use();
  stats_.kv_blocks_moved = far.evicted_blocks;
  stats_.modes = driver_->mode_uses();
  stats_.far_rows = far.rows;
  stats_.experts = engine_->experts_use();
  stats_.moves_far = driver_->moves_far();
  stats_.moves_near = driver_->moves_near();
}

}  // namespace helm
