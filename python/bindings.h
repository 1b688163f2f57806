// What the parts of the Python module share: the engine and its lock, and Ctrl-C in long calls.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <utility>

#include "helm/engine.h"

namespace helm {

// An engine and the lock that keeps its steps apart; Python threads may share an LLM.
struct SharedEngine {
  SharedEngine(Plan plan, EngineOptions options) : engine(std::move(plan), std::move(options)) {}
  Engine engine;
  std::mutex mutex;
};

// Runs without the GIL, holding the engine's lock.
template <typename Work>
auto locked(SharedEngine& shared, const Work& work) {
  const nanobind::gil_scoped_release released;
  const std::lock_guard<std::mutex> lock(shared.mutex);
  return work(shared.engine);
}

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
