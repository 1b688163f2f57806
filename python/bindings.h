// What the parts of the Python module share: the engine and its lock, and Ctrl-C in long calls.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "gil.h"
#include "helm/engine.h"
#include "helm/service.h"

namespace helm {

// An engine and the lock that keeps its steps apart; Python threads may share an LLM.
class SharedEngine {
 public:
  SharedEngine(Plan plan, EngineOptions options)
      : engine_(std::make_shared<Engine>(std::move(plan), std::move(options))) {}

  const Plan& plan() const { return engine_->plan(); }  // never changes
  bool forked() const { return engine_->forked(); }
  void check_process() const { engine_->check_process(); }

  // The engine for a part of the runtime that has it alone from now on.
  std::shared_ptr<Engine> lend() const {
    check_process();
    return engine_;
  }

  // From now on the service steps the engine, and all other work waits for its turn between steps.
  // To be called before another thread knows the engine.
  std::shared_ptr<Service> start_service(const ServiceOptions& options) {
    check_process();
    if (!service_.expired()) {
      throw Error(ErrorKind::kInvalid, "[service] the engine has one; end that first");
    }
    const auto service = std::make_shared<Service>(engine_, options);
    service_ = service;
    return service;
  }

  // Runs work(engine) without the GIL, holding the lock. Throws kInvalid in a callback of such
  // work.
  template <typename Work>
  auto locked(Work&& work) {
    check_process();  // before a lock that nobody may be there to give back
    if (is_holder()) {
      throw Error(ErrorKind::kInvalid,
                  "[engine] called from a callback of the same engine, which is at work; "
                  "call it when that has returned");
    }
    const Released released;
    const std::shared_ptr<Service> service = service_.lock();
    if (service == nullptr || exclusive_ == std::this_thread::get_id()) {
      const Hold hold(*this);
      return work(*engine_);
    }
    using Result = std::invoke_result_t<Work, Engine&>;
    if constexpr (std::is_void_v<Result>) {
      service->between_steps(
          [&](Engine& engine, PrefixCache*) {
            const Hold hold(*this);
            work(engine);
          },
          !python_ends());
    } else {
      std::optional<Result> result;
      service->between_steps(
          [&](Engine& engine, PrefixCache*) {
            const Hold hold(*this);
            result.emplace(work(engine));
          },
          !python_ends());
      return std::move(*result);
    }
  }

  // Likewise for work that changes nothing: a callback may do it.
  template <typename Work>
  auto read(Work&& work) {
    return is_holder() ? work(*engine_) : locked(work);
  }

  // Likewise for work that gives something back: from a callback, where Python may collect garbage,
  // it waits until the work that calls back has ended. So it owns what it needs. In a forked child
  // there is nothing to give back.
  template <typename Work>
  void release(Work work) {
    if (forked()) return;
    if (is_holder()) {
      late_.emplace_back(std::move(work));
    } else {
      locked(work);
    }
  }

  // Runs a call in Python between two steps of the service; all that it does with the engine is
  // done at once.
  void exclusively(Service& service, const std::function<void()>& call) {
    check_process();
    const Released released;
    service.between_steps(
        [&](Engine&, PrefixCache*) {
          exclusive_ = std::this_thread::get_id();
          const Reset reset(exclusive_);
          const Acquired acquired;
          if (!acquired) throw Error(ErrorKind::kInvalid, "[engine] Python is ending");
          call();
        },
        !python_ends());
  }

  // Destroys both, in order, as release() would; for destructors. Where that cannot be done they
  // stay for ever.
  void drop(std::shared_ptr<void> first, std::shared_ptr<void> second = nullptr) noexcept {
    using Parts = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
    try {
      release([parts = new Parts(std::move(first), std::move(second))](Engine&) {
        parts->first.reset();
        delete parts;
      });
    } catch (...) {  // nobody is there to be told
    }
  }

 private:
  class Hold {
   public:
    // Where Python ends, a thread that has the lock may rest with it for ever.
    explicit Hold(SharedEngine& shared) : shared_(shared), lock_(shared.mutex_, std::defer_lock) {
      if (!python_ends()) {
        lock_.lock();
      } else if (!lock_.try_lock()) {
        throw Error(ErrorKind::kInvalid,
                    "[engine] Python is ending while another thread is at work; join threads "
                    "before the program ends");
      }
      shared.holder_ = std::this_thread::get_id();
    }
    ~Hold() {
      while (!shared_.late_.empty()) {
        const auto work = std::move(shared_.late_.front());
        shared_.late_.pop_front();
        try {
          work(*shared_.engine_);
        } catch (...) {  // whoever asked for it has gone on
        }
      }
      shared_.holder_ = std::thread::id();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    SharedEngine& shared_;
    std::unique_lock<std::mutex> lock_;
  };

  class Reset {
   public:
    explicit Reset(std::atomic<std::thread::id>& id) : id_(id) {}
    ~Reset() { id_ = std::thread::id(); }
    Reset(const Reset&) = delete;
    Reset& operator=(const Reset&) = delete;

   private:
    std::atomic<std::thread::id>& id_;
  };

  bool is_holder() const { return holder_ == std::this_thread::get_id(); }

  std::shared_ptr<Engine> engine_;
  std::weak_ptr<Service> service_;  // expired: whoever calls steps the engine
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_;
  std::atomic<std::thread::id> exclusive_;         // whose call has the engine to itself
  std::deque<std::function<void(Engine&)>> late_;  // the holder's
};

// As Python gives it.
using Listener = std::optional<nanobind::typed<nanobind::callable, void(int64_t, int64_t)>>;

// Progress that native code calls without the GIL; Ctrl-C is raised from it, whether or not anyone
// listens. Where Python ends it throws, so that native code lets go of what it holds.
inline Progress interruptible(const Listener& listener) {
  std::shared_ptr<nanobind::object> call;
  if (listener) call = shared_object(nanobind::object(*listener));
  return [call](int64_t done_bytes, int64_t total_bytes) {
    const Acquired acquired;
    const pid_t process = getpid();
    if (!acquired) throw Error(ErrorKind::kInvalid, "[engine] Python is ending");
    const bool raised = in_python([&] {
      if (call != nullptr) {
        PyObject* result =
            PyObject_CallFunction(call->ptr(), "LL", static_cast<long long>(done_bytes),
                                  static_cast<long long>(total_bytes));
        if (result == nullptr) return true;
        Py_DECREF(result);
      }
      return PyErr_CheckSignals() != 0;
    });
    if (raised) throw nanobind::python_error();
    if (getpid() != process) {
      throw Error(ErrorKind::kInvalid,
                  "[engine] a callback forked and returned in the child, which cannot go on with "
                  "the call; end the child within the callback");
    }
  };
}

// Calls Python from a thread of the engine; what it raises is an Error, as that thread knows no
// Python. where: begins the message.
template <typename Call>
void call_from_engine(const std::string& where, const Call& call) {
  const Acquired acquired;
  if (!acquired) throw Error(ErrorKind::kInvalid, where + "Python is ending");
  std::string raised;
  try {
    call();
  } catch (nanobind::python_error& error) {
    raised = nanobind::str(error.value()).c_str();
  } catch (const std::exception& error) {
    raised = error.what();
  }
  if (!raised.empty()) throw Error(ErrorKind::kInvalid, where + raised);
}

// Where the packages that Python imports have cuBLAS: helm.machine.devices knows.
std::vector<std::string> cublas_directories();

nanobind::dict timings_dict(const RequestTimings& timings);
const char* finish_name(Finish finish);

void bind_constraint(nanobind::module_& m);  // before bind_generation()
void bind_footprint(nanobind::module_& m);
void bind_generation(nanobind::module_& m);
void bind_machine(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_service(nanobind::module_& m);
void bind_speculation(nanobind::module_& m);  // before bind_generation() and bind_service()
void bind_probe(nanobind::module_& m);
void bind_device_probe(nanobind::module_& m);
void bind_weights(nanobind::module_& m);

}  // namespace helm
