// Drafters in the Python module, and drafters that Python computes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "helm/speculation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

using Guess = nb::typed<nb::callable, std::vector<int32_t>(int64_t, std::vector<int32_t>, int64_t)>;

class CalledDrafter final : public Drafter {
 public:
  explicit CalledDrafter(const Guess& guess) : guess_(shared_object(nb::object(guess))) {}

  Draft propose(int64_t request, std::span<const int32_t> tokens, int64_t most) override {
    Draft draft;
    call_from_engine("[speculate] ", [&] {
      const std::vector<int32_t> known(tokens.begin(), tokens.end());
      draft.tokens = nb::cast<std::vector<int32_t>>((*guess_)(request, known, most));
    });
    return draft;
  }

 private:
  std::shared_ptr<nb::object> guess_;
};

}  // namespace

void bind_speculation(nb::module_& m) {
  nb::class_<Drafter>(m, "Drafter",
                      "Guesses which tokens come next, for one generation or service.");
  m.def("ngram_drafter", &ngram_drafter,
        "Guesses that a text goes on as it did after the longest run that its end repeats.");
  m.def(
      "model_drafter", [](const SharedEngine& engine) { return model_drafter(engine.lend()); },
      "engine"_a, nb::keep_alive<0, 1>(),
      "Guesses what a smaller model with the same vocabulary finds likeliest. Its engine is the\n"
      "drafter's alone from now on.");
  m.def(
      "called_drafter",
      [](const Guess& guess) -> std::shared_ptr<Drafter> {
        return std::make_shared<CalledDrafter>(guess);
      },
      "guess"_a,
      "Calls guess(request, tokens, most) for at most `most` ids that may follow `tokens`, a\n"
      "request's prompt and output. Called from the engine's thread.");
  m.def(
      "speculation_obstacle", [](const SharedEngine& e) { return speculation_obstacle(e.plan()); },
      "engine"_a, "Why an engine cannot compute guesses with the same tokens; empty: it can.");
}

}  // namespace helm
