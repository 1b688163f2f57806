// The service in the Python module: conversions, docstrings and GIL handling.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>

#include "bindings.h"
#include "helm/service.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

// A service and the engine that it steps.
class PyService {
  static PrefixCache& there(PrefixCache* prefixes, const char* what) {
    if (prefixes != nullptr) return *prefixes;
    throw Error(
        ErrorKind::kInvalid,
        std::string("[kv] nothing is kept with prefix_cache=False; leave that out to ") + what);
  }

  // As SharedEngine::locked(), with the service's prefix cache, which is null without one.
  template <typename Work>
  auto with_prefixes(const Work& work) {
    return shared_->locked([&](Engine& engine) { return work(engine, service_->prefixes()); });
  }

  // Nobody ends the service where that could not be waited for.
  void keep() noexcept { static_cast<void>(new std::shared_ptr<Service>(std::move(service_))); }

 public:
  PyService(std::shared_ptr<SharedEngine> shared, bool prefix_cache,
            std::shared_ptr<Drafter> drafter, int64_t guesses)
      : shared_(std::move(shared)),
        service_(shared_->start_service({prefix_cache, {std::move(drafter), guesses}})) {}
  ~PyService() {
    if (shared_->forked()) {
      keep();
      return;
    }
    const Released released;
    if (python_ends()) {  // where a thread may rest that has the engine
      service_->freeze();
      try {
        service_->between_steps([](Engine&, PrefixCache*) {}, false);
      } catch (...) {
        keep();
        return;
      }
    }
    service_.reset();
  }
  PyService(const PyService&) = delete;
  PyService& operator=(const PyService&) = delete;

  std::vector<RequestId> submit(std::vector<Request> requests,
                                const std::shared_ptr<Outbox>& outbox, bool more) {
    return service_->submit_all(std::move(requests), outbox, more);
  }
  void begin() {
    if (!shared_->forked()) service_->begin();
  }
  void cancel(RequestId request) {
    if (!shared_->forked()) service_->cancel(request);
  }
  void exclusively(const nb::callable& call) {
    shared_->exclusively(*service_, [&] { call(); });
  }

  // Sequences that their opener steps, between the service's steps.
  std::pair<SequenceId, int64_t> open(const std::vector<int32_t>& prompt, int64_t capacity) {
    return with_prefixes([&](Engine& engine, PrefixCache* prefixes) {
      PrefixCache::Opened opened;
      if (prefixes == nullptr) {
        opened.sequence = engine.open(capacity);
      } else {
        opened = prefixes->open(prompt, capacity);
      }
      service_->held(1);
      return std::pair(opened.sequence, opened.cached);
    });
  }
  void close(SequenceId sequence) {
    shared_->release([service = service_, sequence](Engine& engine) {
      PrefixCache* prefixes = service->prefixes();
      prefixes == nullptr ? engine.close(sequence) : prefixes->close(sequence);
      service->held(-1);
    });
  }
  int64_t kept() {
    return with_prefixes(
        [&](Engine&, PrefixCache* prefixes) { return prefixes == nullptr ? 0 : prefixes->kept(); });
  }
  void clear() {
    shared_->release([service = service_](Engine&) {
      if (service->prefixes() != nullptr) service->prefixes()->clear();
    });
  }
  int64_t save(const std::vector<int32_t>& tokens, const std::filesystem::path& path,
               const std::string& metadata, const Listener& listener) {
    const Progress progress = interruptible(listener);
    return with_prefixes([&](Engine&, PrefixCache* prefixes) {
      return there(prefixes, "save").save(tokens, path.string(), metadata, progress);
    });
  }
  std::pair<std::vector<int32_t>, std::string> load(const std::filesystem::path& path,
                                                    const Listener& listener) {
    const Progress progress = interruptible(listener);
    return with_prefixes([&](Engine&, PrefixCache* prefixes) {
      return there(prefixes, "load").load(path.string(), progress);
    });
  }

  bool wait_for_room(double seconds) {
    const Released released;
    return service_->wait_for_room(seconds);
  }
  void refuse_waiting(const std::string& why) {
    const Released released;
    service_->refuse_waiting(std::make_exception_ptr(Error(ErrorKind::kInvalid, why)));
  }
  void pace(double step_target_s) {
    const Released released;
    service_->pace(step_target_s);
  }
  void drain() { service_->drain(); }
  void stop(double grace_s) {
    const Released released;
    service_->stop(grace_s);
  }
  void freeze() {
    if (shared_->forked()) return;
    const Released released;
    service_->freeze();
  }
  nb::dict stats() const {
    const ServiceStats stats = service_->stats();
    nb::dict out;
    out["running"] = stats.running;
    out["waiting"] = stats.waiting;
    out["steps"] = stats.steps;
    out["tokens"] = stats.tokens;
    out["guessed_tokens"] = stats.guessed_tokens;
    out["accepted_tokens"] = stats.accepted_tokens;
    out["saved_s"] = stats.saved_s;
    out["kv_blocks_used"] = stats.kv_blocks_used;
    out["kv_blocks_total"] = stats.kv_blocks_total;
    out["parked"] = stats.parked;
    out["preemptions"] = stats.preemptions;
    out["kv_blocks_moved"] = stats.kv_blocks_moved;
    out["moves_far"] = stats.moves_far;
    out["moves_near"] = stats.moves_near;
    for (const StepMode mode : kExecutedModes) {
      const ModeUse& use = stats.modes[static_cast<size_t>(mode)];
      const std::string name(mode_name(mode));
      out[(name + "_steps").c_str()] = use.steps;
      out[(name + "_predicted_s").c_str()] = use.predicted_s;
      out[(name + "_measured_s").c_str()] = use.measured_s;
    }
    out["far_rows"] = stats.far_rows;
    if (stats.experts.runs > 0) {
      out["experts_read"] = stats.experts.distinct;
      out["experts_expected"] = stats.experts.expected;
    }
    return out;
  }
  void check() const {
    if (const auto failure = service_->failure()) std::rethrow_exception(failure);
  }

 private:
  std::shared_ptr<SharedEngine> shared_;
  std::shared_ptr<Service> service_;
};

bool wait_outbox(Outbox& outbox, double seconds, bool ended) {
  const Released released;
  return outbox.wait(seconds, ended);
}

void raise_error(const Event& event) {
  if (event.error) std::rethrow_exception(event.error);
}

}  // namespace

void bind_service(nb::module_& m) {
  nb::class_<Event>(m, "Event", "One token of a request, or its end.")
      .def_prop_ro("request", [](const Event& e) { return e.token.request; })
      .def_prop_ro("id", [](const Event& e) { return e.token.id; })
      .def_prop_ro("logprob", [](const Event& e) { return e.token.logprob; })
      .def_prop_ro("top", [](const Event& e) { return e.token.top; })
      .def_prop_ro("finish", [](const Event& e) { return finish_name(e.token.finish); })
      .def_prop_ro("timings",
                   [](const Event& e) {
                     nb::dict out = timings_dict(e.timings);
                     out["cached_tokens"] = e.cached_tokens;
                     return out;
                   })
      .def("rethrow", &raise_error, "Raises what the request failed with, if it did.");
  nb::class_<Outbox>(m, "Outbox", "What a service has for one of its users.")
      .def(nb::init<>())
      .def("poll", &Outbox::poll, "The events since the last call.")
      .def("wait", &wait_outbox, "seconds"_a, "ended"_a = false,
           "Waits for an event or, with `ended`, until all requests have ended; whether so.")
      .def("event_fd", &Outbox::event_fd, "A file descriptor, readable while there are events.");
  nb::class_<PyService>(m, "Service", nb::is_weak_referenceable(),
                        "Steps an engine in a thread of its own; the engine's other calls wait for "
                        "their turn\nbetween steps.")
      .def(nb::init<std::shared_ptr<SharedEngine>, bool, std::shared_ptr<Drafter>, int64_t>(),
           "engine"_a, "prefix_cache"_a = true, "drafter"_a.none() = nb::none(), "guesses"_a = 0,
           "`drafter` guesses tokens: `guesses` per step and request, or 0 for as many as pay.")
      .def("submit", &PyService::submit, "requests"_a, "outbox"_a, "more"_a = false,
           "Computes requests, whose events go to the outbox; returns their ids. If one is bad\n"
           "none begins. With `more` an engine at rest waits for others until begin().")
      .def("begin", &PyService::begin, "An engine at rest begins with what was submitted.")
      .def("cancel", &PyService::cancel, "request"_a,
           "Ends a request within a step, without an event.")
      .def("wait_for_room", &PyService::wait_for_room, "seconds"_a,
           "Waits until a request ends; False if none is open.")
      .def("pace", &PyService::pace, "step_target_s"_a,
           "Sets what a step that decodes for a streamed request may take beside prompts; 0: 2.25\n"
           "times one without them in which all that run decode.")
      .def("exclusively", &PyService::exclusively, "call"_a,
           "Calls between two steps; meanwhile the engine is the caller's alone.")
      .def("open", &PyService::open, "prompt"_a, "capacity"_a,
           "Opens a sequence of up to `capacity` positions for the engine's own calls; (its id, "
           "how\n"
           "many leading tokens of `prompt` it holds). Kept sequences give way.")
      .def("close", &PyService::close, "sequence"_a, "Closes a sequence that open() gave.")
      .def_prop_ro("kept", &PyService::kept,
                   "How many prefixes are kept, of which none begins with another.")
      .def("clear", &PyService::clear, "Gives up what is kept.")
      .def("save", &PyService::save, "tokens"_a, "path"_a, "metadata"_a = "",
           "progress"_a.none() = nb::none(),
           "Writes what is kept of `tokens`; how many that are. `progress` gets (done, total)\n"
           "bytes and may raise to cancel.")
      .def("load", &PyService::load, "path"_a, "progress"_a.none() = nb::none(),
           "Keeps what a file holds; (its tokens, the metadata).")
      .def("refuse_waiting", &PyService::refuse_waiting, "why"_a,
           "Ends the requests that have not begun, each with InvalidError.")
      .def("drain", &PyService::drain, "Refuses further requests.")
      .def("stop", &PyService::stop, "grace_s"_a, "Drains, waits so long, and ends what is open.")
      .def("freeze", &PyService::freeze, "Runs no further step; what is open stays so.")
      .def_prop_ro("stats", &PyService::stats)
      .def("check", &PyService::check, "Raises what the last failed step failed with, if one did.");
}

}  // namespace helm
