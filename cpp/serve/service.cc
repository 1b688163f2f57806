// The engine thread: takes what is submitted, steps the driver, fills the outboxes, and lends the
// engine out between steps.
#include "helm/service.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/process.h"
#include "serve/driver.h"
#include "serve/outbox.h"

namespace helm {
namespace {

// Signals go to the threads that expect them; those of a fault stay with who makes it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
      sigdelset(&all, fault);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

std::chrono::duration<double> duration(double seconds) {
  constexpr double kLongest = 1e6;  // what the clock can add
  return std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest));
}

}  // namespace

class Service::Impl {
 public:
  Impl(std::shared_ptr<Engine> engine, const ServiceOptions& options);
  ~Impl();

  std::vector<RequestId> submit_all(std::vector<Request> requests,
                                    const std::shared_ptr<Outbox>& outbox);
  void cancel(RequestId id);
  void between_steps(const std::function<void(Engine&, PrefixCache*)>& work, bool waits = true);
  bool wait_for_room(double seconds);
  void held(int64_t change) {
    if (driver_ != nullptr) driver_->held_by_others(change);
  }
  void drain();
  void stop(double grace_s);
  void freeze() noexcept;
  ServiceStats stats() const;
  std::exception_ptr failure() const;
  const Engine& engine() const { return *engine_; }
  PrefixCache* prefixes() { return prefixes_.get(); }
  bool here() const { return process_.here(); }
  bool is_holder() const { return holder_ == std::this_thread::get_id(); }

 private:
  // A request that comes or, with nothing to come, one that goes.
  struct Command {
    RequestId id;
    std::unique_ptr<Active> request;
    std::shared_ptr<Outbox> outbox;
  };
  void check_process() const { engine_->check_process(); }
  void check_caller() const;
  void run() noexcept;
  bool engine_may_go() const;
  void take_commands();
  void step() noexcept;
  void deliver();
  void end_all(const std::exception_ptr& why) noexcept;
  void publish();

  Process process_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<PrefixCache> prefixes_;  // or null

  // Used by the engine's thread, or by the one that has the turn.
  std::unique_ptr<Driver> driver_;
  std::map<RequestId, std::shared_ptr<Outbox>> outboxes_;  // of open requests
  int64_t tokens_ = 0;

  mutable std::mutex mutex_;       // guards what follows
  std::condition_variable wake_;   // the engine's thread
  std::condition_variable turn_;   // those that wait for their turn
  std::condition_variable ended_;  // those that wait for an end
  std::vector<Command> inbox_;     // in order
  bool draining_ = false;          // takes no more
  bool quit_ = false;              // the thread is to end
  bool gone_ = false;              // it has
  RequestId next_id_ = 0;
  bool busy_ = false;        // the driver has requests
  bool stalled_ = false;     // they wait for what somebody else holds
  bool parked_ = false;      // the thread waits, and touches nothing
  bool lent_ = false;        // somebody has the turn: the holder
  bool step_first_ = false;  // before the next turn, if there is something to do
  int64_t tickets_ = 0;      // turns asked for
  int64_t served_ = 0;       // turns that are over
  int64_t ends_ = 0;         // requests that ended, and turns
  ServiceStats stats_;
  std::exception_ptr failure_;

  std::atomic<std::thread::id> holder_;
  std::thread thread_;
};

// From work between steps the service cannot be waited for.
void Service::Impl::check_caller() const {
  check_process();  // before a lock that nobody may be there to give back
  if (!is_holder()) return;
  fail(ErrorKind::kInvalid,
       "[engine] called from a callback of the same engine, which is at work; call it when that "
       "has returned");
}

Service::Impl::Impl(std::shared_ptr<Engine> engine, const ServiceOptions& options)
    : engine_(std::move(engine)) {
  if (engine_ == nullptr) fail(ErrorKind::kInvalid, "[service] no engine was given");
  if (options.prefix_cache) prefixes_ = std::make_unique<PrefixCache>(*engine_);
  driver_ = std::make_unique<Driver>(*engine_, prefixes_.get());
  const Plan& plan = engine_->plan();
  stats_.kv_blocks_total = plan.kv.layers > 0 ? plan.kv.pages / plan.kv.layers : 0;
  const SignalsBlocked blocked;  // as the new thread will have them
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    fail_to_start(0, 1, error);
  }
}

Service::Impl::~Impl() {
  stop(0);
}

std::vector<RequestId> Service::Impl::submit_all(std::vector<Request> requests,
                                                 const std::shared_ptr<Outbox>& outbox) {
  check_caller();
  if (outbox == nullptr) fail(ErrorKind::kInvalid, "[service] no outbox was given");
  const Plan& plan = engine_->plan();
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::string number = requests.size() == 1 ? "" : "request " + std::to_string(i) + ": ";
    check_request(plan, requests[i], "[generate] " + number);
    if (requests[i].sequence < 0) continue;
    fail(ErrorKind::kInvalid, "[service] a request cannot continue sequence ", requests[i].sequence,
         "; leave it out, what was computed is found by its tokens");
  }
  std::vector<Command> commands;
  for (Request& request : requests) {
    commands.push_back({0, std::make_unique<Active>(0, plan, std::move(request)), outbox});
  }
  std::vector<RequestId> ids(commands.size());
  const std::lock_guard lock(mutex_);
  if (draining_) {
    fail(ErrorKind::kInvalid, "[service] it is stopping and takes no more requests");
  }
  inbox_.reserve(inbox_.size() + commands.size());
  for (size_t i = 0; i < commands.size(); ++i) {
    commands[i].id = commands[i].request->id = ids[i] = next_id_++;
    inbox_.push_back(std::move(commands[i]));
    outbox->impl_->opened();
  }
  if (parked_) wake_.notify_one();
  return ids;
}

void Service::Impl::cancel(RequestId id) {
  check_process();
  const std::lock_guard lock(mutex_);
  if (driver_ == nullptr || id < 0 || id >= next_id_) return;
  inbox_.push_back({id, nullptr, nullptr});
  if (parked_) wake_.notify_one();
}

// What the engine's thread waits for, if nobody has the turn or is to have it next.
bool Service::Impl::engine_may_go() const {
  if (lent_ || gone_) return false;
  return quit_ ||
         (((busy_ && !stalled_) || !inbox_.empty()) && (tickets_ == served_ || step_first_));
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
  stats_.kv_blocks_used = driver_->reserved_blocks();
}

void Service::Impl::between_steps(const std::function<void(Engine&, PrefixCache*)>& work,
                                  bool waits) {
  check_caller();
  {
    std::unique_lock lock(mutex_);
    if (!waits && lent_) fail(ErrorKind::kInvalid, "[service] another thread has the engine");
    const int64_t mine = tickets_++;
    turn_.wait(lock, [&] {
      return parked_ && !lent_ && served_ == mine && !(step_first_ && engine_may_go());
    });
    lent_ = true;
    holder_ = std::this_thread::get_id();
  }
  std::exception_ptr thrown;
  try {
    if (driver_ != nullptr) {
      take_commands();
      driver_->collect_steps();
      deliver();
    }
    work(*engine_, prefixes_.get());
  } catch (...) {
    thrown = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    holder_ = std::thread::id();
    lent_ = false;
    ++served_;
    ++ends_;
    step_first_ = true;
    stalled_ = false;
    wake_.notify_one();
    turn_.notify_all();
    ended_.notify_all();
  }
  if (thrown) std::rethrow_exception(thrown);
}

bool Service::Impl::wait_for_room(double seconds) {
  check_caller();
  std::unique_lock lock(mutex_);
  if (!busy_ && inbox_.empty()) return false;
  const int64_t before = ends_;
  ended_.wait_for(lock, duration(seconds), [&] { return ends_ != before || gone_; });
  return true;
}

void Service::Impl::drain() {
  check_caller();
  const std::lock_guard lock(mutex_);
  draining_ = true;
}

void Service::Impl::stop(double grace_s) {
  drain();
  {
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, duration(grace_s),
                    [this] { return (!busy_ && inbox_.empty()) || gone_; });
    quit_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  if (driver_ == nullptr) return;
  between_steps([this](Engine&, PrefixCache*) {
    const Error error(ErrorKind::kInvalid, "[service] it was stopped before the request ended");
    if (!outboxes_.empty()) end_all(std::make_exception_ptr(error));
    const std::lock_guard lock(mutex_);
    driver_ = nullptr;
    prefixes_ = nullptr;
    busy_ = false;
  });
}

void Service::Impl::freeze() noexcept {
  if (!here()) return;
  std::unique_lock lock(mutex_);
  quit_ = true;
  wake_.notify_one();
  turn_.wait(lock, [this] { return parked_; });
}

ServiceStats Service::Impl::stats() const {
  check_process();
  const std::lock_guard lock(mutex_);
  ServiceStats stats = stats_;
  stats.waiting += std::count_if(inbox_.begin(), inbox_.end(),
                                 [](const Command& c) { return c.request != nullptr; });
  return stats;
}

std::exception_ptr Service::Impl::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

Service::Service(std::shared_ptr<Engine> engine, const ServiceOptions& options)
    : impl_(std::make_unique<Impl>(std::move(engine), options)) {}

Service::~Service() {
  // In a child its thread and its locks are not there; from its own work it cannot be ended.
  if (!impl_->here() || impl_->is_holder()) static_cast<void>(impl_.release());
}

RequestId Service::submit(Request request, const std::shared_ptr<Outbox>& outbox) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  return impl_->submit_all(std::move(one), outbox)[0];
}
std::vector<RequestId> Service::submit_all(std::vector<Request> requests,
                                           const std::shared_ptr<Outbox>& outbox) {
  return impl_->submit_all(std::move(requests), outbox);
}
void Service::cancel(RequestId request) {
  impl_->cancel(request);
}
void Service::between_steps(const std::function<void(Engine&, PrefixCache*)>& work, bool waits) {
  impl_->between_steps(work, waits);
}
bool Service::wait_for_room(double seconds) {
  return impl_->wait_for_room(seconds);
}
void Service::held(int64_t change) {
  impl_->held(change);
}
void Service::drain() {
  impl_->drain();
}
void Service::stop(double grace_s) {
  impl_->stop(grace_s);
}
void Service::freeze() noexcept {
  impl_->freeze();
}
ServiceStats Service::stats() const {
  return impl_->stats();
}
std::exception_ptr Service::failure() const {
  return impl_->failure();
}
PrefixCache* Service::prefixes() {
  return impl_->prefixes();
}
const Engine& Service::engine() const {
  return impl_->engine();
}

}  // namespace helm
