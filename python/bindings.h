// What the parts of the Python module share: the engine and its lock, and Ctrl-C in long calls.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "helm/engine.h"

namespace helm {

// An engine and the lock that keeps its steps apart; Python threads may share an LLM.
class SharedEngine {
 public:
  SharedEngine(Plan plan, EngineOptions options) : engine_(std::move(plan), std::move(options)) {}

  const Plan& plan() const { return engine_.plan(); }  // never changes

  // Runs work(engine) without the GIL, holding the lock. Throws kInvalid in a callback of such
  // work.
  template <typename Work>
  auto locked(Work&& work) {
    if (is_holder()) {
      throw Error(ErrorKind::kInvalid,
                  "[engine] called from a callback of the same engine, which is at work; "
                  "call it when that has returned");
    }
    const nanobind::gil_scoped_release released;
    const Hold hold(*this);
    return work(engine_);
  }

  // Likewise for work that changes nothing: a callback may do it.
  template <typename Work>
  auto read(Work&& work) {
    return is_holder() ? work(engine_) : locked(work);
  }

  // Likewise for work that gives something back: from a callback, where Python may collect garbage,
  // it waits until the work that calls back has ended. So it owns what it needs.
  template <typename Work>
  void release(Work work) {
    if (is_holder()) {
      late_.emplace_back(std::move(work));
    } else {
      locked(work);
    }
  }

 private:
  class Hold {
   public:
    explicit Hold(SharedEngine& shared) : shared_(shared), lock_(shared.mutex_) {
      shared.holder_ = std::this_thread::get_id();
    }
    ~Hold() {
      while (!shared_.late_.empty()) {
        const auto work = std::move(shared_.late_.front());
        shared_.late_.pop_front();
        try {
          work(shared_.engine_);
        } catch (...) {  // whoever asked for it has gone on
        }
      }
      shared_.holder_ = std::thread::id();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    SharedEngine& shared_;
    std::lock_guard<std::mutex> lock_;
  };

  bool is_holder() const { return holder_ == std::this_thread::get_id(); }

  Engine engine_;
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_;
  std::deque<std::function<void(Engine&)>> late_;  // the holder's
};

// Progress that native code calls without the GIL; Ctrl-C is raised from it, whether or not anyone
// listens.
inline Progress interruptible(Progress listener) {
  return [listener = std::move(listener)](int64_t done_bytes, int64_t total_bytes) {
    const nanobind::gil_scoped_acquire acquired;
    if (listener) listener(done_bytes, total_bytes);
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  };
}

void bind_generation(nanobind::module_& m);
void bind_machine(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_device_probe(nanobind::module_& m);

}  // namespace helm
