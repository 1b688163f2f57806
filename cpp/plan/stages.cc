#include "plan/stages.h"

#include <algorithm>
#include <string>
#include <variant>

#include "base/check.h"

namespace helm {
namespace {

template <typename Visit>
void each_op(const Plan& plan, const std::vector<bool>& chosen, const Visit& visit) {
  for (size_t u = 0; u < plan.units.size(); ++u) {
    if (!chosen[u]) continue;
    for (const Op& op : plan.units[u].ops) visit(op);
  }
}

}  // namespace

std::vector<DeviceIndex> resident_units(const Plan& plan) {
  std::vector<DeviceIndex> places;
  for (const UnitSpec& unit : plan.units) places.push_back(unit.device);
  return places;
}

std::vector<DeviceIndex> visiting_units(const Plan& plan) {
  std::vector<DeviceIndex> places = resident_units(plan);
  const std::vector<bool> visits = visits_of(plan);
  for (size_t u = 0; u < places.size(); ++u) {
    if (visits[u]) places[u] = Plan::kFirstAccelerator;
  }
  return places;
}

std::vector<bool> visits_of(const Plan& plan) {
  std::vector<bool> visits;
  for (const UnitSpec& unit : plan.units) {
    visits.push_back(unit.device == kCpu && unit.layer != UnitSpec::kNoLayer);
  }
  return visits;
}

size_t layer_end(const Plan& plan, size_t begin) {
  const int64_t layer = plan.units[begin].layer;
  size_t end = begin + 1;
  if (layer == UnitSpec::kNoLayer) return end;
  while (end < plan.units.size() && plan.units[end].layer == layer) ++end;
  return end;
}

std::vector<bool> units_on(DeviceIndex device, const std::vector<DeviceIndex>& places) {
  std::vector<bool> chosen;
  for (const DeviceIndex place : places) chosen.push_back(place == device);
  return chosen;
}

std::vector<StageSpan> stages_of(const Plan& plan, const std::vector<DeviceIndex>& places) {
  std::vector<StageSpan> stages;
  for (size_t begin = 0; begin < plan.units.size();) {
    size_t end = begin + 1;
    while (end < plan.units.size() && places[end] == places[begin]) ++end;
    stages.push_back({places[begin], begin, end, {}});
    begin = end;
  }
  constexpr int kNowhere = -1;
  std::vector<int> writer(plan.values.size(), kNowhere);  // the last stage that wrote each value
  for (size_t s = 0; s < stages.size(); ++s) {
    const auto here = static_cast<int>(s);
    for (const UnitSpec& unit : stages[s].units(plan)) {
      for (const Op& op : unit.ops) {
        each_value(plan, op, [&](ValueIndex v, Access access) {
          int& from = writer[static_cast<size_t>(v)];
          if (access != Access::kWrite && from != here && from != kNowhere) {
            if (from != here - 1) {
              fail(ErrorKind::kInvalid, "[plan] unit \"", unit.name, "\" reads value \"",
                   plan.values[static_cast<size_t>(v)].name, "\", which was last written ",
                   here - from, " stages before; only neighbouring stages hand values over");
            }
            stages[s].inputs.push_back(v);
            from = here;
          }
          if (access != Access::kRead) from = here;
        });
      }
    }
  }
  return stages;
}

const AttentionOp* attention_of(const UnitSpec& unit) {
  for (const Op& op : unit.ops) {
    if (const auto* attention = std::get_if<AttentionOp>(&op)) return attention;
  }
  return nullptr;
}

int64_t value_bytes(const Plan& plan, ValueIndex index, int64_t tokens, int64_t outputs) {
  const ValueSpec& value = plan.values[static_cast<size_t>(index)];
  return (value.per_output ? outputs : tokens) * value.width * int64_t{sizeof(float)};
}

std::vector<bool> values_of(const Plan& plan, const std::vector<bool>& chosen) {
  std::vector<bool> used(plan.values.size(), false);
  each_op(plan, chosen, [&](const Op& op) {
    each_value(plan, op, [&](ValueIndex v, Access) { used[static_cast<size_t>(v)] = true; });
  });
  return used;
}

std::vector<TensorIndex> tensors_of(const Plan& plan, const std::vector<bool>& chosen) {
  std::vector<TensorIndex> order;
  std::vector<bool> seen(plan.tensors.size(), false);
  each_op(plan, chosen, [&](const Op& op) {
    each_tensor(op, [&](TensorIndex tensor, Reads) {
      if (seen[static_cast<size_t>(tensor)]) return;
      seen[static_cast<size_t>(tensor)] = true;
      order.push_back(tensor);
    });
  });
  return order;
}

std::vector<DeviceIndex> entry_devices(const Plan& plan) {
  std::vector<DeviceIndex> devices(plan.kv.layers.size(), kCpu);
  for (const UnitSpec& unit : plan.units) {
    const AttentionOp* attention = attention_of(unit);
    if (attention != nullptr) devices[static_cast<size_t>(attention->layer)] = unit.device;
  }
  return devices;
}

}  // namespace helm
