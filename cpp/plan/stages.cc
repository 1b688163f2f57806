#include "plan/stages.h"

#include <algorithm>
#include <variant>

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

std::vector<bool> lacking_units(const Plan& plan) {
  std::vector<bool> lacking;
  for (const UnitSpec& unit : plan.units) {
    bool lacks = false;
    for (const Op& op : unit.ops) {
      each_tensor(op, [&](TensorIndex tensor, Reads) {
        lacks = lacks || (unit.device != kCpu && plan.slice(tensor, unit.device) == nullptr);
      });
    }
    lacking.push_back(lacks);
  }
  return lacking;
}

bool prompts_read_more(const Plan& plan) {
  const auto mixes = [](const UnitSpec& unit) {
    return std::ranges::any_of(unit.ops,
                               [](const Op& op) { return std::holds_alternative<ExpertsOp>(op); });
  };
  return plan.schedule.visit_tokens > 0 || std::ranges::any_of(plan.units, mixes);
}

size_t layer_begin(const Plan& plan, size_t unit) {
  const int64_t layer = plan.units[unit].layer;
  if (layer == UnitSpec::kNoLayer) return unit;
  while (unit > 0 && plan.units[unit - 1].layer == layer) --unit;
  return unit;
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

std::vector<bool> cut_units(const Plan& plan, const std::vector<DeviceIndex>& places) {
  std::vector<bool> cut;
  for (size_t begin = 0, end = 0; begin < plan.units.size(); begin = end) {
    const UnitSpec& first = plan.units[begin];
    bool several = false;
    for (; end < plan.units.size() && plan.units[end].kind == first.kind &&
           plan.units[end].layer == first.layer;
         ++end) {
      several = several || places[end] != places[begin];
    }
    cut.resize(end, several);
  }
  return cut;
}

std::vector<StageSpan> stages_of(const Plan& plan, const std::vector<DeviceIndex>& places) {
  const std::vector<bool> cut = cut_units(plan, places);
  const auto joins = [&](size_t unit) {  // the stage of the unit before
    const UnitSpec &one = plan.units[unit - 1], &next = plan.units[unit];
    const bool apart = cut[unit] && one.kind == next.kind && one.layer == next.layer;
    return places[unit] == places[unit - 1] && !apart;
  };
  std::vector<StageSpan> stages;
  for (size_t begin = 0, end = 0; begin < plan.units.size(); begin = end) {
    for (end = begin + 1; end < plan.units.size() && joins(end);) ++end;
    stages.push_back({places[begin], begin, end, {}});
  }
  constexpr size_t kNone = ~size_t{0};
  struct Held {
    size_t writer = kNone, copied = kNone;  // the last stages that wrote it, that it came for
    std::vector<bool> on;                   // by device: as last written
  };
  std::vector<Held> values(plan.values.size(), {kNone, kNone, {}});
  for (size_t here = 0; here < stages.size(); ++here) {
    const auto device = static_cast<size_t>(stages[here].device);
    const auto use = [&](ValueIndex v, Access access) {
      Held& held = values[static_cast<size_t>(v)];
      if (access != Access::kWrite && held.writer != kNone && held.writer != here) {
        if (!held.on[device]) {
          stages[here].inputs.push_back({v, held.writer});
          held.copied = here;
          held.on[device] = true;
        }
        stages[here].resumes = stages[here].resumes || held.copied != here;
      }
      if (access == Access::kRead) return;
      held.writer = here;
      held.on.assign(plan.devices.size(), false);
      held.on[device] = true;
    };
    for (const UnitSpec& unit : stages[here].units(plan)) {
      for (const Op& op : unit.ops) each_value(plan, op, use);
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

std::vector<TensorIndex> tensors_on(const Plan& plan, DeviceIndex device) {
  std::vector<TensorIndex> held =
      tensors_of(plan, device == kCpu ? std::vector<bool>(plan.units.size(), true)
                                      : units_on(device, resident_units(plan)));
  std::erase_if(held, [&](TensorIndex t) { return plan.slice(t, device) == nullptr; });
  return held;
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
