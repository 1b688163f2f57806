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

bool is_block(const UnitSpec& unit) {
  return std::any_of(unit.ops.begin(), unit.ops.end(),
                     [](const Op& op) { return std::holds_alternative<AttentionOp>(op); });
}

}  // namespace

std::vector<bool> resident_units(const Plan& plan) {
  std::vector<bool> there;
  for (const UnitSpec& unit : plan.units) there.push_back(unit.device == "accelerator");
  return there;
}

std::vector<bool> visiting_units(const Plan& plan) {
  std::vector<bool> there = resident_units(plan);
  for (size_t u = 0; u < there.size(); ++u) there[u] = there[u] || is_block(plan.units[u]);
  return there;
}

std::vector<StageSpan> stages_of(const Plan& plan, const std::vector<bool>& on_accelerator) {
  std::vector<StageSpan> stages;
  for (size_t begin = 0; begin < plan.units.size();) {
    size_t end = begin + 1;
    while (end < plan.units.size() && on_accelerator[end] == on_accelerator[begin]) ++end;
    stages.push_back({on_accelerator[begin], begin, end, {}});
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

std::vector<bool> accelerator_layers(const Plan& plan) {
  const auto layers = static_cast<size_t>(plan.kv.layers);
  std::vector<bool> seen(layers, false);
  std::vector<bool> there(layers, false);
  const std::vector<bool> resident = resident_units(plan);
  for (size_t u = 0; u < plan.units.size(); ++u) {
    for (const Op& op : plan.units[u].ops) {
      const auto* attention = std::get_if<AttentionOp>(&op);
      if (attention == nullptr) continue;
      const auto layer = static_cast<size_t>(attention->layer);
      if (seen[layer] && there[layer] != resident[u]) {
        fail(ErrorKind::kInvalid, "[plan] KV layer ", layer, " has attention on both devices");
      }
      seen[layer] = true;
      there[layer] = resident[u];
    }
  }
  return there;
}

}  // namespace helm
