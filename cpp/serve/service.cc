// What a service's users call: what is submitted and cancelled, and turns between steps.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "serve/outbox.h"
#include "serve/service_impl.h"

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
  driver_ = std::make_unique<Driver>(*engine_, prefixes_.get(), options.speculation);
  const Plan& plan = engine_->plan();
  stats_.kv_blocks_total = plan.kv.blocks;
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
                                                 const std::shared_ptr<Outbox>& outbox, bool more) {
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
  gathers_ = more && (gathers_ || inbox_.empty());
  inbox_.reserve(inbox_.size() + commands.size());
  for (size_t i = 0; i < commands.size(); ++i) {
    commands[i].id = commands[i].request->id = ids[i] = next_id_++;
    inbox_.push_back(std::move(commands[i]));
    outbox->impl_->opened();
  }
  if (parked_ && !more) wake_.notify_one();
  return ids;
}

void Service::Impl::begin() {
  check_process();
  const std::lock_guard lock(mutex_);
  end_gathering();
}

void Service::Impl::end_gathering() {
  gathers_ = false;
  if (parked_) wake_.notify_one();
}

void Service::Impl::cancel(RequestId id) {
  check_process();
  const std::lock_guard lock(mutex_);
  if (driver_ == nullptr || id < 0 || id >= next_id_) return;
  inbox_.push_back({id, nullptr, nullptr});
  if (parked_) wake_.notify_one();
}

void Service::Impl::between_steps(const std::function<void(Engine&, PrefixCache*)>& work,
                                  bool waits) {
  check_caller();
  {
    std::unique_lock lock(mutex_);
    if (!waits && lent_) fail(ErrorKind::kInvalid, "[service] another thread has the engine");
    const int64_t mine = tickets_++;
    end_gathering();
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

void Service::Impl::refuse_waiting(const std::exception_ptr& why) {
  between_steps([&](Engine&, PrefixCache*) {
    if (driver_ == nullptr) return;
    driver_->refuse_waiting(why);
    deliver();
  });
}

void Service::Impl::pace(double step_target_s) {
  if (!(step_target_s >= 0)) {
    fail(ErrorKind::kInvalid, "[service] step_target_s must be 0 or more seconds, got ",
         step_target_s);
  }
  between_steps([&](Engine&, PrefixCache*) {
    if (driver_ != nullptr) driver_->pace(step_target_s);
  });
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
    end_gathering();
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
  return impl_->submit_all(std::move(one), outbox, false)[0];
}
std::vector<RequestId> Service::submit_all(std::vector<Request> requests,
                                           const std::shared_ptr<Outbox>& outbox, bool more) {
  return impl_->submit_all(std::move(requests), outbox, more);
}
void Service::begin() {
  impl_->begin();
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
void Service::refuse_waiting(const std::exception_ptr& why) {
  impl_->refuse_waiting(why);
}
void Service::pace(double step_target_s) {
  impl_->pace(step_target_s);
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
