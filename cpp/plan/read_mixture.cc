// Ops of a mixture of experts in a plan.
#include "plan/reader.h"

namespace helm {
namespace {

template <typename Value>
Value one_of(const JsonReader& node, std::initializer_list<std::pair<const char*, Value>> known) {
  const std::string name = node.string();
  std::string all;
  for (const auto& [own, value] : known) {
    if (name == own) return value;
    all += (all.empty() ? "" : ", ") + std::string(own);
  }
  node.reject("expected one of ", all, ", found \"", name, "\"");
}

}  // namespace

ActivationKind PlanReader::activation_kind(const JsonReader& node) {
  return one_of<ActivationKind>(node, {{"silu", ActivationKind::kSilu},
                                       {"gelu", ActivationKind::kGelu},
                                       {"gelu_tanh", ActivationKind::kGeluTanh},
                                       {"relu", ActivationKind::kRelu},
                                       {"scale", ActivationKind::kScale},
                                       {"softcap", ActivationKind::kSoftcap},
                                       {"swiglu_limit", ActivationKind::kSwigluLimit}});
}

Op PlanReader::read_route(const JsonReader& node) {
  node.only({"op", "in", "out", "chosen", "score", "normalise", "scale", "bias", "groups",
             "groups_kept", "group_best", "near"});
  RouteOp op{};
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  if (op.in == op.out) node.reject("in and out must differ");
  same_rows(node, op.in, op.out);
  const int64_t experts = width(op.in);
  op.chosen = node["chosen"].integer(1, experts);
  if (width(op.out) != 2 * op.chosen) node["out"].reject("must be twice `chosen` wide");
  op.score = one_of<RouteScore>(node["score"], {{"softmax", RouteScore::kSoftmax},
                                                {"softmax_selected", RouteScore::kSoftmaxSelected},
                                                {"sigmoid", RouteScore::kSigmoid},
                                                {"sparsemixer", RouteScore::kSparsemixer}});
  if (node.has("normalise")) op.normalise = node["normalise"].boolean();
  if (node.has("scale")) op.scale = node["scale"].number();
  if (node.has("bias")) op.bias = optional_vector(node["bias"], experts);
  if (node.has("groups")) op.groups = node["groups"].integer(1, experts);
  if (experts % op.groups != 0) node["groups"].reject("must divide the ", experts, " experts");
  if (node.has("groups_kept")) op.groups_kept = node["groups_kept"].integer(1, op.groups);
  const int64_t size = experts / op.groups;
  if (op.groups > 1 && op.chosen > op.groups_kept * size) {
    node["chosen"].reject("is more than the ", op.groups_kept * size,
                          " experts of the groups kept");
  }
  if (node.has("group_best")) op.group_best = node["group_best"].integer(1, size);
  if (node.has("near")) op.near = node["near"].number();
  return op;
}

Op PlanReader::read_experts(const JsonReader& node) {
  node.only({"op", "in", "routes", "out", "experts", "chosen", "size", "layout", "gate", "up",
             "down", "gate_bias", "up_bias", "down_bias", "activation", "factor"});
  ExpertsOp op{};
  op.in = value(node["in"]);
  op.routes = value(node["routes"]);
  op.out = value(node["out"]);
  if (op.in == op.out || op.routes == op.out) node.reject("in and out must differ");
  same_rows(node, op.in, op.out);
  same_rows(node, op.routes, op.out);
  op.experts = node["experts"].integer(1, kMaxCount);
  op.chosen = node["chosen"].integer(1, op.experts);
  if (width(op.routes) != 2 * op.chosen) node["routes"].reject("must be twice `chosen` wide");
  op.size = node["size"].integer(1, kMaxWidth);
  op.layout = one_of<GateUp>(node["layout"], {{"apart", GateUp::kApart},
                                              {"halves", GateUp::kHalves},
                                              {"neighbours", GateUp::kNeighbours}});
  const bool apart = op.layout == GateUp::kApart;
  const int64_t rows = op.experts * op.size * (apart ? 1 : 2);
  op.gate = matrix(node["gate"], rows, width(op.in));
  if (apart == node["up"].is_null()) {
    node["up"].reject("expected ", apart ? "a matrix" : "null: gate has its rows");
  }
  op.up = apart ? matrix(node["up"], rows, width(op.in)) : kNoTensor;
  op.down = matrix(node["down"], op.experts * width(op.out), op.size);
  if (node.has("gate_bias")) op.gate_bias = optional_vector(node["gate_bias"], rows);
  if (node.has("up_bias")) op.up_bias = optional_vector(node["up_bias"], rows);
  if (op.up_bias != kNoTensor && !apart) node["up_bias"].reject("is in gate_bias");
  if (node.has("down_bias")) {
    op.down_bias = optional_vector(node["down_bias"], op.experts * width(op.out));
  }
  op.activation = activation_kind(node["activation"]);
  const bool bounded = op.activation == ActivationKind::kSwigluLimit;
  if (op.activation == ActivationKind::kScale || op.activation == ActivationKind::kSoftcap) {
    node["activation"].reject("expected one of a gate");
  }
  if (node.has("factor")) {
    if (!bounded) node["factor"].reject("only swiglu_limit has a factor");
    op.factor = node["factor"].number();
  }
  if (bounded && !(op.factor > 0)) node["factor"].reject("must be above 0");
  return op;
}

// An expert's rows of packed formats begin where a strip does.
void PlanReader::check_experts(const JsonReader& slices) const {
  std::unordered_map<TensorIndex, int64_t> rows;  // of an expert
  for (const UnitSpec& unit : plan_.units) {
    for (const Op& op : unit.ops) {
      const auto* experts = std::get_if<ExpertsOp>(&op);
      if (experts == nullptr) continue;
      for (const TensorIndex t : {experts->gate, experts->up}) rows[t] = experts->size;
      rows[experts->down] = width(experts->out);
    }
  }
  for (size_t i = 0; i < plan_.slices.size(); ++i) {
    const SliceSpec& slice = plan_.slices[i];
    const auto found = rows.find(slice.tensor);
    if (found == rows.end() || found->second % row_unit(slice.format) == 0) continue;
    slices[i]["format"].reject("\"", plan_.tensors[static_cast<size_t>(slice.tensor)].name,
                               "\" has ", found->second, " rows per expert, no multiple of the ",
                               row_unit(slice.format), " that ", format_name(slice.format),
                               " keeps together");
  }
}

}  // namespace helm
