// What a service is made of. Implemented in service_thread.cc (what the engine's thread does) and
// service.cc (what its users call).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/process.h"
#include "helm/service.h"
#include "serve/driver.h"

namespace helm {

class Service::Impl {
 public:
  Impl(std::shared_ptr<Engine> engine, const ServiceOptions& options);
  ~Impl();

  std::vector<RequestId> submit_all(std::vector<Request> requests,
                                    const std::shared_ptr<Outbox>& outbox, bool more);
  void begin();
  void cancel(RequestId id);
  void between_steps(const std::function<void(Engine&, PrefixCache*)>& work, bool waits = true);
  void pace(double step_target_s);
  void refuse_waiting(const std::exception_ptr& why);
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
  void end_gathering();
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
  bool gathers_ = false;           // more follow: at rest, they are waited for
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

}  // namespace helm
