// Generation and the prefix cache in the Python module: conversions, docstrings and GIL handling.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>

#include "bindings.h"
#include "helm/generation.h"
#include "helm/prefix_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

// A prefix cache and the engine that it must not outlive.
class PyPrefixCache {
 public:
  explicit PyPrefixCache(std::shared_ptr<SharedEngine> shared)
      : shared_(std::move(shared)), cache_(shared_->locked([](Engine& engine) {
          return std::make_shared<PrefixCache>(engine);
        })) {}
  ~PyPrefixCache() { shared_->drop(std::move(cache_)); }
  PyPrefixCache(const PyPrefixCache&) = delete;
  PyPrefixCache& operator=(const PyPrefixCache&) = delete;
  const std::shared_ptr<PrefixCache>& cache() const { return cache_; }

  std::pair<SequenceId, int64_t> open(const std::vector<int32_t>& prompt, int64_t capacity) {
    return shared_->locked([&](Engine&) {
      const PrefixCache::Opened opened = cache_->open(prompt, capacity);
      return std::pair(opened.sequence, opened.cached);
    });
  }
  bool fits(int64_t capacity) {
    return shared_->read([&](Engine&) { return cache_->fits(capacity); });
  }
  void keep(SequenceId sequence, std::vector<int32_t> tokens) {
    shared_->release([cache = cache_, sequence, tokens = std::move(tokens)](Engine&) {
      cache->keep(sequence, tokens);
    });
  }
  void close(SequenceId sequence) {
    shared_->release([cache = cache_, sequence](Engine&) { cache->close(sequence); });
  }
  void clear() {
    shared_->release([cache = cache_](Engine&) { cache->clear(); });
  }
  int64_t kept() {
    return shared_->read([&](Engine&) { return cache_->kept(); });
  }
  int64_t save(const std::vector<int32_t>& tokens, const std::filesystem::path& path,
               const std::string& metadata, const Listener& listener) {
    const Progress progress = interruptible(listener);
    return shared_->locked(
        [&](Engine&) { return cache_->save(tokens, path.string(), metadata, progress); });
  }
  std::pair<std::vector<int32_t>, std::string> load(const std::filesystem::path& path,
                                                    const Listener& listener) {
    const Progress progress = interruptible(listener);
    return shared_->locked([&](Engine&) { return cache_->load(path.string(), progress); });
  }

 private:
  std::shared_ptr<SharedEngine> shared_;
  std::shared_ptr<PrefixCache> cache_;  // shared with what waits to be done with it
};

class PyGeneration {
 public:
  PyGeneration(std::shared_ptr<SharedEngine> shared, std::vector<Request> requests,
               const std::shared_ptr<PyPrefixCache>& prefixes, std::shared_ptr<Drafter> drafter,
               int64_t guesses)
      : shared_(std::move(shared)), count_(requests.size()) {
    if (prefixes != nullptr) prefixes_ = prefixes->cache();
    shared_->locked([&](Engine& engine) {
      generation_ = std::make_shared<Generation>(engine, std::move(requests), prefixes_.get(),
                                                 Speculation{std::move(drafter), guesses});
    });
  }
  ~PyGeneration() { shared_->drop(std::move(generation_), std::move(prefixes_)); }
  PyGeneration(const PyGeneration&) = delete;
  PyGeneration& operator=(const PyGeneration&) = delete;

  bool done() const {
    return shared_->read([&](Engine&) { return generation_->done(); });
  }
  std::vector<Token> advance(double seconds) {
    return shared_->locked([&](Engine&) { return generation_->advance(seconds); });
  }
  void cancel(RequestId request) {
    check(request);
    shared_->release([generation = generation_, request](Engine&) { generation->cancel(request); });
  }
  void rethrow(RequestId request) const {
    check(request);
    shared_->read([&](Engine&) { generation_->rethrow(request); });
  }
  RequestTimings timings(RequestId request) const {
    check(request);
    // In a forked child, numbers that nobody changes any more: closing a stream there asks for
    // them.
    if (shared_->forked()) return generation_->timings(request);
    return shared_->read([&](Engine&) { return generation_->timings(request); });
  }

 private:
  void check(RequestId request) const {
    if (request < 0 || static_cast<size_t>(request) >= count_) {
      throw nb::index_error("no such request");
    }
  }

  std::shared_ptr<SharedEngine> shared_;
  std::shared_ptr<PrefixCache> prefixes_;  // null: nothing is reused
  size_t count_;
  std::shared_ptr<Generation> generation_;  // shared with what waits to be done with it
};

}  // namespace

nb::dict timings_dict(const RequestTimings& t) {
  nb::dict out;
  out["queue_s"] = t.queue_s;
  out["prefill_s"] = t.prefill_s;
  out["prefill_tokens"] = t.prefill_tokens;
  out["first_token_s"] = t.first_token_s;
  out["decode_s"] = t.decode_s;
  out["decode_tokens"] = t.decode_tokens;
  out["decode_bytes"] = t.decode_bytes;
  out["guessed_tokens"] = t.guessed_tokens;
  out["accepted_tokens"] = t.accepted_tokens;
  out["saved_s"] = t.saved_s;
  out["parked"] = t.parked;
  out["again_tokens"] = t.again_tokens;
  return out;
}

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::kNone:
      return "";
    case Finish::kStop:
      return "stop";
    case Finish::kLength:
      return "length";
    case Finish::kError:
      return "error";
  }
  return "";
}

namespace {

void bind_prefix_cache(nb::module_& m) {
  nb::class_<PyPrefixCache>(m, "PrefixCache",
                            "What sequences held, kept after use and found by its tokens.")
      .def(nb::init<std::shared_ptr<SharedEngine>>(), "engine"_a)
      .def("open", &PyPrefixCache::open, "prompt"_a, "capacity"_a,
           "Opens a sequence of up to `capacity` positions; (its id, how many leading tokens of\n"
           "`prompt` it holds). Kept sequences give way, the least recently used first.")
      .def("fits", &PyPrefixCache::fits, "capacity"_a,
           "Whether `capacity` positions find room beside the sequences in use.")
      .def("keep", &PyPrefixCache::keep, "sequence"_a, "tokens"_a,
           "Gives a sequence back: what it holds of `tokens` is kept.")
      .def("close", &PyPrefixCache::close, "sequence"_a, "Closes a sequence.")
      .def("clear", &PyPrefixCache::clear, "Gives up what is kept.")
      .def_prop_ro("kept", &PyPrefixCache::kept,
                   "How many prefixes are kept, of which none begins with another.")
      .def("save", &PyPrefixCache::save, "tokens"_a, "path"_a, "metadata"_a = "",
           "progress"_a.none() = nb::none(),
           "Writes what is kept of `tokens`; how many that are. `progress` gets (done, total)\n"
           "bytes and may raise to cancel.")
      .def("load", &PyPrefixCache::load, "path"_a, "progress"_a.none() = nb::none(),
           "Keeps what a file holds; (its tokens, the metadata).");
}

}  // namespace

void bind_generation(nb::module_& m) {
  bind_prefix_cache(m);
  nb::class_<Request>(m, "Request", "What to generate, and how to sample it.")
      .def(
          "__init__",
          [](Request* self, std::vector<int32_t> prompt, int64_t cached, SequenceId sequence,
             int64_t max_tokens, std::vector<int32_t> stop_tokens, float temperature, int32_t top_k,
             float top_p, float min_p, float repetition_penalty, uint64_t seed, int32_t logprobs,
             float presence_penalty, float frequency_penalty,
             std::vector<std::pair<int32_t, float>> logit_bias,
             std::shared_ptr<TokenConstraint> constraint, int32_t priority, int64_t key,
             bool streamed) {
            new (self)
                Request{std::move(prompt),
                        cached,
                        sequence,
                        max_tokens,
                        std::move(stop_tokens),
                        {temperature, top_k, top_p, min_p, repetition_penalty, seed, logprobs,
                         presence_penalty, frequency_penalty, std::move(logit_bias)},
                        std::move(constraint),
                        priority,
                        key,
                        streamed};
          },
          nb::kw_only(), "prompt"_a, "cached"_a = 0, "sequence"_a = -1, "max_tokens"_a = 128,
          "stop_tokens"_a = std::vector<int32_t>(), "temperature"_a = 0.0F, "top_k"_a = 0,
          "top_p"_a = 1.0F, "min_p"_a = 0.0F, "repetition_penalty"_a = 1.0F, "seed"_a = 0,
          "logprobs"_a = -1, "presence_penalty"_a = 0.0F, "frequency_penalty"_a = 0.0F,
          "logit_bias"_a = std::vector<std::pair<int32_t, float>>(),
          "constraint"_a.none() = nb::none(), "priority"_a = Request::kNormal, "key"_a = 0,
          "streamed"_a = true,
          "priority: 0 (batch), 1 or 2 (interactive). key: whose request it is. streamed: whether "
          "somebody reads its tokens as they come, beside which prompts are paced.");
  nb::class_<Token>(m, "Token", "One sampled token.")
      .def_ro("request", &Token::request)
      .def_ro("id", &Token::id)
      .def_ro("logprob", &Token::logprob)
      .def_ro("top", &Token::top)
      .def_prop_ro("finish", [](const Token& t) { return finish_name(t.finish); });
  nb::class_<PyGeneration>(m, "Generation", "Requests generating over one engine.")
      .def(nb::init<std::shared_ptr<SharedEngine>, std::vector<Request>,
                    std::shared_ptr<PyPrefixCache>, std::shared_ptr<Drafter>, int64_t>(),
           "engine"_a, "requests"_a, "prefixes"_a.none() = nb::none(),
           "drafter"_a.none() = nb::none(), "guesses"_a = 0,
           "With `prefixes`, requests without a sequence share what begins alike. `drafter` "
           "guesses\n"
           "tokens: `guesses` per step and request, or 0 for as many as pay.")
      .def("advance", &PyGeneration::advance, "seconds"_a,
           "Runs steps for about `seconds` (at least one); returns the sampled tokens. A request\n"
           "that fails alone ends with finish \"error\", and no token.")
      .def("rethrow", &PyGeneration::rethrow, "request"_a, "Raises what the request failed with.")
      .def("cancel", &PyGeneration::cancel, "request"_a)
      .def_prop_ro("done", &PyGeneration::done)
      .def(
          "timings",
          [](const PyGeneration& g, RequestId request) { return timings_dict(g.timings(request)); },
          "request"_a);
}

}  // namespace helm
