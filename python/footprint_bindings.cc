// The module's part for the planner's count of scratch: limits and KV geometry as Python has them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "helm/footprint.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

using Units = std::vector<std::string>;

Footprint::Setting setting_of(nb::handle limits, nb::handle kv, int threads, bool packed = false) {
  const auto integer = [](nb::handle from, const char* name) {
    return nb::cast<int64_t>(from.attr(name));
  };
  Footprint::Setting setting;
  setting.limits = {integer(limits, "context"), integer(limits, "step_tokens"),
                    integer(limits, "step_outputs"), integer(limits, "sequences")};
  setting.kv_dtype = kv_dtype_from_name(nb::cast<std::string>(kv.attr("dtype")));
  setting.page_tokens = integer(kv, "page_tokens");
  setting.threads = threads;
  setting.packed = packed;
  return setting;
}

DeviceKind kind_of(const std::string& name) {
  if (name == "cpu") return DeviceKind::kCpu;
  if (name == "accelerator") return DeviceKind::kAccelerator;
  throw Error(ErrorKind::kInvalid,
              "[footprint] kind is \"" + name + "\"; expected \"cpu\" or \"accelerator\"");
}

}  // namespace

void bind_footprint(nb::module_& m) {
  nb::class_<Footprint>(m, "Footprint",
                        "Bytes of scratch that stages of a model need, by the formulas with which "
                        "the engine\nallocates it: of whatever processor or GPU takes the most.")
      .def(nb::init<std::string_view>(), "graph"_a,
           "graph: JSON with a plan's kv (layers, kv_heads, head_dim), rope, tensors, values, "
           "units\nand logits.")
      .def(
          "workspace",
          [](Footprint& f, const Units& units, const std::string& kind, nb::handle limits,
             nb::handle kv, int threads, bool packed) {
            return f.workspace(units, kind_of(kind), setting_of(limits, kv, threads, packed));
          },
          "units"_a, "kind"_a, "limits"_a, "kv"_a, "threads"_a, "packed"_a = false,
          "Of a device of that kind, \"cpu\" or \"accelerator\", that has the units of these "
          "names; 0\nwithout. limits, kv: "
          "helm.plan.schema's "
          "Limits\nand KvSpec. packed: an accelerator may have packed weights.")
      .def(
          "far_workspace",
          [](Footprint& f, const Units& units, nb::handle limits, nb::handle kv, int threads) {
            return f.far_workspace(units, setting_of(limits, kv, threads));
          },
          "units"_a, "limits"_a, "kv"_a, "threads"_a,
          "Of the CPU, which attends to KV pages in host memory for units of the accelerator.");
}

}  // namespace helm
