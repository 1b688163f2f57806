// The module's part for programs: what steps of a plan do, as text.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "helm/predictor.h"
#include "helm/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {

void bind_program(nb::module_& m) {
  m.def(
      "program", [](std::string_view plan) { return programs(Plan::from_json(plan)); }, "plan"_a,
      "What a step does, a text for each kind of step that the plan (JSON) can have: a line that "
      "names\nthe kind, then one for each task in the order in which the engine enqueues it. Loads "
      "nothing.\nRaises InvalidError for what is no plan, and names the field.");
  nb::list modes;
  for (const StepMode mode : kExecutedModes) modes.append(std::string(mode_name(mode)));
  m.attr("EXECUTED_MODES") = nb::tuple(modes);
}

}  // namespace helm
