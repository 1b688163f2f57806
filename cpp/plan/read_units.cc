// Units of a plan: each by itself, beside its neighbours, and what the plan as a whole needs of
// them.
#include <algorithm>
#include <iterator>

#include "plan/reader.h"
#include "plan/stages.h"

namespace helm {
namespace {

constexpr const char* kUnitKinds[] = {"embedding", "attention", "mlp", "head"};  // by UnitKind

const char* name_of(UnitKind kind) {
  return kUnitKinds[static_cast<size_t>(kind)];
}

UnitKind unit_kind(const JsonReader& node) {
  const std::string name = node.string();
  for (size_t kind = 0; kind < std::size(kUnitKinds); ++kind) {
    if (name == kUnitKinds[kind]) return static_cast<UnitKind>(kind);
  }
  node.reject("expected embedding, attention, mlp or head, found \"", name, "\"");
}

bool is_attention(const Op& op) {
  return std::holds_alternative<AttentionOp>(op);
}

bool writes(const Plan& plan, const UnitSpec& unit, ValueIndex value) {
  bool found = false;
  for (const Op& op : unit.ops) {
    each_value(plan, op, [&](ValueIndex v, Access access) {
      found = found || (v == value && access != Access::kRead);
    });
  }
  return found;
}

}  // namespace

void PlanReader::read_unit(const JsonReader& node) {
  node.only({"name", "kind", "layer", "device", "ops"});
  read_ops(node, device(node["device"]));
}

void PlanReader::read_ops(const JsonReader& node, DeviceIndex device) {
  UnitSpec unit{
      .name = node["name"].string(), .kind = unit_kind(node["kind"]), .device = device, .ops = {}};
  const JsonReader layer = node["layer"], ops = node["ops"];
  const bool in_layer = unit.kind == UnitKind::kAttention || unit.kind == UnitKind::kMlp;
  if (in_layer && layer.is_null()) {
    layer.reject("expected the layer that this ", name_of(unit.kind), " is of, found null");
  }
  if (!in_layer && !layer.is_null()) {
    layer.reject("expected null: the ", name_of(unit.kind), " is of no layer");
  }
  if (in_layer) unit.layer = layer.integer(0, kMaxCount);
  for (size_t i = 0; i < ops.size(); ++i) unit.ops.push_back(read_op(ops[i]));
  check_unit(node, unit);
  if (!unit_names_.insert(unit.name).second) {
    node["name"].reject("\"", unit.name, "\" is listed twice");
  }
  plan_.units.push_back(std::move(unit));
}

// A unit by itself, and beside the one before it.
void PlanReader::check_unit(const JsonReader& node, const UnitSpec& unit) const {
  const auto attentions = std::count_if(unit.ops.begin(), unit.ops.end(), is_attention);
  const int64_t most = unit.kind == UnitKind::kAttention ? 1 : 0;
  if (attentions > most) {
    node["ops"].reject("a unit of kind ", name_of(unit.kind), " has ",
                       most == 1 ? "one attention op at most" : "no attention op", ", found ",
                       attentions);
  }
  if (unit.layer == UnitSpec::kNoLayer || plan_.units.empty()) return;
  const UnitSpec& before = plan_.units.back();
  if (unit.layer < before.layer) {
    node["layer"].reject("layer ", unit.layer, " comes after layer ", before.layer,
                         "; layers ascend");
  }
  if (unit.layer == before.layer && unit.kind < before.kind) {
    node["kind"].reject("the ", name_of(unit.kind), " of layer ", unit.layer, " comes after its ",
                        name_of(before.kind));
  }
}

// The embedding comes first and is one unit, the head's units come last.
void PlanReader::check_ends(const JsonReader& units) const {
  size_t head = plan_.units.size();  // its first unit
  while (head > 0 && plan_.units[head - 1].kind == UnitKind::kHead) --head;
  if (head == plan_.units.size() && head > 0) {
    units[head - 1]["kind"].reject("the last unit is of the head");
  }
  for (size_t u = 0; u < head; ++u) {
    const UnitKind kind = plan_.units[u].kind;
    if (kind == UnitKind::kHead) units[u]["kind"].reject("only the last units are of the head");
    if ((u == 0) != (kind == UnitKind::kEmbedding)) {
      units[u]["kind"].reject("the first unit is the embedding, and no other is");
    }
  }
}

// Of each layer that visits the accelerator there is something to bring.
void PlanReader::check_visits(const JsonReader& units) const {
  const std::vector<bool> visits = visits_of(plan_);
  for (size_t u = 0, end = 0; u < visits.size(); u = end) {
    end = layer_end(plan_, u);
    std::vector<bool> only(visits.size(), false);
    for (size_t one = u; one < end; ++one) only[one] = visits[one];
    const bool some = std::ranges::find(only, true) != only.end();
    if (some && tensors_of(plan_, only).empty()) {
      units[u].reject("visits the accelerator without tensors");
    }
  }
}

// Units of an accelerator whose weights visit it: of layers, whose KV pages all lie there.
void PlanReader::check_lacking(const JsonReader& root) const {
  const std::vector<bool> lacking = lacking_units(plan_);
  const auto found = std::ranges::find(lacking, true);
  if (found == lacking.end()) return;
  const std::string& name = plan_.units[static_cast<size_t>(found - lacking.begin())].name;
  const std::string where = " where weights visit a unit, as \"" + name + "\"";
  for (size_t u = 0; u < lacking.size(); ++u) {
    if (!lacking[u] || plan_.units[u].layer != UnitSpec::kNoLayer) continue;
    root["units"][u].reject(
        "reads a tensor of which its device has no slice; only weights of layers visit it");
  }
  const JsonReader schedule = root["schedule"];
  if (plan_.schedule.visit_tokens > 0) schedule["prefill"].reject("expected \"compute\"", where);
  for (size_t d = kCpu + 1; d < plan_.devices.size(); ++d) {
    const int64_t least = pages_on(static_cast<DeviceIndex>(d));
    if (plan_.pages[d] >= least) continue;
    schedule["pages"][plan_.devices[d].name].reject("expected all pages, ", least,
                                                    ", of its KV entries", where);
  }
}

// Where units of one layer and kind lie on several devices, a step is on all of them at once: none
// overlaps another, and all KV pages lie where they are attended to.
void PlanReader::check_cut(const JsonReader& schedule) const {
  const std::vector<bool> cut = cut_units(plan_, resident_units(plan_));
  const auto found = std::ranges::find(cut, true);
  if (found == cut.end()) return;
  const std::string& name = plan_.units[static_cast<size_t>(found - cut.begin())].name;
  const std::string where = " where a layer or the head is cut, as at unit \"" + name + "\"";
  if (plan_.schedule.decode_groups != 1) schedule["decode_groups"].reject("expected 1", where);
  if (plan_.schedule.prefill_overlap) schedule["prefill_overlap"].reject("expected false", where);
  for (size_t d = kCpu + 1; d < plan_.devices.size(); ++d) {
    const int64_t least = pages_on(static_cast<DeviceIndex>(d));
    if (plan_.pages[d] >= least) continue;
    schedule["pages"][plan_.devices[d].name].reject("expected all pages, ", least,
                                                    ", of its KV entries", where);
  }
}

void PlanReader::check_logits(const JsonReader& node) const {
  if (!per_output(plan_.logits) || width(plan_.logits) != plan_.vocab_size) {
    node.reject("must be a value of width vocab_size with rows \"outputs\"");
  }
  if (plan_.units.empty() || !writes(plan_, plan_.units.back(), plan_.logits)) {
    node.reject("must be written by the last unit");
  }
}

}  // namespace helm
