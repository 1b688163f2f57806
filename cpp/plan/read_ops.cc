// Ops of a plan, and the tensors and values that they name.
#include "plan/reader.h"

namespace helm {

TensorIndex PlanReader::tensor(const JsonReader& node) const {
  const auto it = tensor_index_.find(node.string());
  if (it == tensor_index_.end()) node.reject("unknown tensor \"", node.string(), "\"");
  return it->second;
}

TensorIndex PlanReader::matrix(const JsonReader& node, int64_t rows, int64_t cols) const {
  const TensorIndex index = tensor(node);
  const TensorSpec& spec = plan_.tensors[static_cast<size_t>(index)];
  if (spec.shape.size() != 2 || (rows >= 0 && spec.shape[0] != rows) ||
      (cols >= 0 && spec.shape[1] != cols)) {
    node.reject("tensor \"", spec.name, "\" does not have the shape that this op needs (",
                rows < 0 ? std::string("any") : std::to_string(rows), " x ", cols, ")");
  }
  return index;
}

TensorIndex PlanReader::vector(const JsonReader& node, int64_t size) const {
  const TensorIndex index = tensor(node);
  const TensorSpec& spec = plan_.tensors[static_cast<size_t>(index)];
  if (spec.shape.size() != 1 || spec.shape[0] != size) {
    node.reject("tensor \"", spec.name, "\" must have shape [", size, "]");
  }
  return index;
}

TensorIndex PlanReader::optional_vector(const JsonReader& node, int64_t size) const {
  return node.is_null() ? kNoTensor : vector(node, size);
}

ValueIndex PlanReader::value(const JsonReader& node) const {
  const auto it = value_index_.find(node.string());
  if (it == value_index_.end()) node.reject("unknown value \"", node.string(), "\"");
  return it->second;
}

void PlanReader::same_rows(const JsonReader& node, ValueIndex a, ValueIndex b) const {
  if (per_output(a) != per_output(b)) node.reject("mixes a per-token and a per-output value");
}

void PlanReader::per_token(const JsonReader& node, ValueIndex index) const {
  if (per_output(index)) node.reject("needs a value with rows \"tokens\"");
}

void PlanReader::within(const JsonReader& node, ValueIndex index, int64_t offset,
                        int64_t size) const {
  if (offset + size > width(index)) {
    node.reject("elements ", offset, " to ", offset + size, " lie outside value \"",
                plan_.values[static_cast<size_t>(index)].name, "\" of width ", width(index));
  }
}

Op PlanReader::read_embedding(const JsonReader& node) {
  node.only({"op", "table", "out", "scale"});
  EmbeddingOp op{};
  op.out = value(node["out"]);
  per_token(node, op.out);
  op.table = matrix(node["table"], plan_.vocab_size, width(op.out));
  if (node.has("scale")) op.scale = node["scale"].number();
  return op;
}

Op PlanReader::read_position_embedding(const JsonReader& node) {
  node.only({"op", "table", "offset", "out"});
  PositionEmbeddingOp op{};
  op.out = value(node["out"]);
  per_token(node, op.out);
  op.table = matrix(node["table"], -1, width(op.out));
  op.offset = node["offset"].integer(0, kMaxCount);
  const int64_t rows = plan_.tensors[static_cast<size_t>(op.table)].shape[0];
  if (plan_.limits.context + op.offset > rows) {
    node["table"].reject("has ", rows, " rows, too few for a context of ", plan_.limits.context,
                         " with offset ", op.offset);
  }
  return op;
}

Op PlanReader::read_norm(const JsonReader& node) {
  node.only({"op", "kind", "in", "in_offset", "out", "out_offset", "groups", "size", "weight",
             "bias", "eps", "weight_plus", "accumulate"});
  NormOp op{};
  const std::string kind = node["kind"].string();
  if (kind != "rms" && kind != "layer") node["kind"].reject("expected \"rms\" or \"layer\"");
  op.layer_norm = kind == "layer";
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  same_rows(node, op.in, op.out);
  op.in_offset = node["in_offset"].integer(0, kMaxWidth);
  op.out_offset = node["out_offset"].integer(0, kMaxWidth);
  op.groups = node["groups"].integer(1, kMaxWidth);
  op.size = node["size"].integer(1, kMaxWidth);
  within(node, op.in, op.in_offset, op.groups * op.size);
  within(node, op.out, op.out_offset, op.groups * op.size);
  if (op.in == op.out && op.in_offset != op.out_offset) node.reject("overlaps itself");
  op.weight = vector(node["weight"], op.size);
  op.bias = optional_vector(node["bias"], op.size);
  if (op.bias != kNoTensor && !op.layer_norm) node["bias"].reject("an rms norm has no bias");
  op.eps = node["eps"].number();
  if (op.eps < 0) node["eps"].reject("must not be negative");
  if (node.has("weight_plus")) op.weight_plus = node["weight_plus"].number();
  if (node.has("accumulate")) op.accumulate = node["accumulate"].boolean();
  return op;
}

Op PlanReader::read_linear(const JsonReader& node) {
  node.only({"op", "in", "out", "parts", "accumulate"});
  LinearOp op{};
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  if (op.in == op.out) node.reject("in and out must differ");
  same_rows(node, op.in, op.out);
  op.accumulate = node["accumulate"].boolean();
  const JsonReader parts = node["parts"];
  int64_t rows = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].only({"weight", "bias"});
    LinearOp::Part part{};
    part.weight = matrix(parts[i]["weight"], -1, width(op.in));
    const int64_t part_rows = plan_.tensors[static_cast<size_t>(part.weight)].shape[0];
    part.bias = optional_vector(parts[i]["bias"], part_rows);
    rows += part_rows;
    op.parts.push_back(part);
  }
  if (rows != width(op.out)) {
    node["parts"].reject("the parts have ", rows, " rows in all, the output ", width(op.out));
  }
  return op;
}

Op PlanReader::read_rope_op(const JsonReader& node) {
  node.only({"op", "value", "offset", "heads", "head_dim", "rotary", "table", "pairs"});
  RopeOp op{};
  op.value = value(node["value"]);
  per_token(node, op.value);
  op.offset = node["offset"].integer(0, kMaxWidth);
  op.heads = node["heads"].integer(1, kMaxCount);
  op.head_dim = node["head_dim"].integer(1, 4096);
  within(node, op.value, op.offset, op.heads * op.head_dim);
  op.rotary = node["rotary"].integer(2, op.head_dim);
  op.table =
      static_cast<int32_t>(node["table"].integer(0, static_cast<int64_t>(plan_.rope.size()) - 1));
  const RopeTable& table = plan_.rope[static_cast<size_t>(op.table)];
  if (op.rotary != 2 * static_cast<int64_t>(table.inv_freq.size())) {
    node["rotary"].reject("must be twice the length of rope table ", op.table);
  }
  if (op.rotary % 2 != 0) node["rotary"].reject("must be even");
  if (node.has("pairs")) {
    const std::string pairs = node["pairs"].string();
    if (pairs != "halves" && pairs != "neighbours") {
      node["pairs"].reject("expected \"halves\" or \"neighbours\"");
    }
    op.neighbours = pairs == "neighbours";
  }
  return op;
}

Op PlanReader::read_attention(const JsonReader& node) {
  node.only({"op", "in", "q_offset", "k_offset", "v_offset", "out", "layer", "heads", "kv_heads",
             "head_dim", "scale", "window", "softcap", "sinks"});
  AttentionOp op{};
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  if (op.in == op.out) node.reject("in and out must differ");
  per_token(node, op.in);
  per_token(node, op.out);
  op.q_offset = node["q_offset"].integer(0, kMaxWidth);
  op.k_offset = node["k_offset"].integer(0, kMaxWidth);
  op.v_offset = node["v_offset"].integer(0, kMaxWidth);
  op.layer = node["layer"].integer(0, plan_.kv.entries() - 1);
  op.heads = node["heads"].integer(1, kMaxCount);
  const int64_t kv_heads = plan_.kv.layers[static_cast<size_t>(op.layer)].kv_heads;
  op.kv_heads = node["kv_heads"].integer(kv_heads, kv_heads);
  op.head_dim = node["head_dim"].integer(plan_.kv.head_dim, plan_.kv.head_dim);
  if (op.heads % op.kv_heads != 0) node["heads"].reject("must be a multiple of kv_heads");
  within(node, op.in, op.q_offset, op.heads * op.head_dim);
  within(node, op.in, op.k_offset, op.kv_heads * op.head_dim);
  within(node, op.in, op.v_offset, op.kv_heads * op.head_dim);
  if (width(op.out) != op.heads * op.head_dim) node["out"].reject("must be heads * head_dim wide");
  // A partial result per sequence, head and page, in f32.
  const int64_t pages = (plan_.limits.context + plan_.kv.page_tokens - 1) / plan_.kv.page_tokens;
  const int64_t row_bytes = op.heads * (op.head_dim + 2) * int64_t{sizeof(float)};
  if (plan_.limits.sequences > kMaxOffset / row_bytes / pages) {
    node.reject("the partial results of ", plan_.limits.sequences, " sequences of ", pages,
                " pages exceed 64 TiB");
  }
  op.scale = node["scale"].number();
  op.window = node["window"].integer(0, kMaxExtent);
  if (node.has("softcap")) {
    op.softcap = node["softcap"].number();
    if (op.softcap <= 0) node["softcap"].reject("must be above 0");
  }
  if (node.has("sinks")) op.sinks = optional_vector(node["sinks"], op.heads);
  return op;
}

Op PlanReader::read_activation(const JsonReader& node) {
  node.only({"op", "kind", "gated", "in", "out", "size", "factor", "accumulate"});
  ActivationOp op{};
  op.kind = activation_kind(node["kind"]);
  op.gated = node["gated"].boolean();
  const bool bounded = op.kind == ActivationKind::kSwigluLimit;
  if (bounded && !op.gated) node["gated"].reject("expected true: swiglu_limit bounds both halves");
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  same_rows(node, op.in, op.out);
  op.size = node["size"].integer(1, kMaxWidth);
  if (width(op.in) != (op.gated ? 2 : 1) * op.size) node["in"].reject("has the wrong width");
  if (op.in != op.out && width(op.out) != op.size) node["out"].reject("has the wrong width");
  const bool has_factor =
      bounded || op.kind == ActivationKind::kScale || op.kind == ActivationKind::kSoftcap;
  if (node.has("factor")) {
    if (!has_factor) node["factor"].reject("only scale, softcap and swiglu_limit have a factor");
    op.factor = node["factor"].number();
  }
  if ((bounded || op.kind == ActivationKind::kSoftcap) && op.factor <= 0) {
    node["factor"].reject("must be above 0");
  }
  if (node.has("accumulate")) op.accumulate = node["accumulate"].boolean();
  return op;
}

Op PlanReader::read_select(const JsonReader& node) {
  node.only({"op", "in", "out"});
  SelectOp op{value(node["in"]), value(node["out"])};
  per_token(node, op.in);
  if (!per_output(op.out)) node["out"].reject("needs a value with rows \"outputs\"");
  if (width(op.in) != width(op.out)) node.reject("in and out differ in width");
  return op;
}

Op PlanReader::read_add(const JsonReader& node) {
  node.only({"op", "in", "out"});
  AddOp op{value(node["in"]), value(node["out"])};
  const JsonReader out = node["out"];
  if (op.in == op.out) out.reject("in and out must differ");
  same_rows(out, op.in, op.out);
  if (width(op.in) != width(op.out)) out.reject("in and out differ in width");
  return op;
}

Op PlanReader::read_concat(const JsonReader& node) {
  node.only({"op", "in", "out"});
  ConcatOp op{{}, value(node["out"])};
  const JsonReader ins = node["in"];
  if (ins.size() == 0) ins.reject("expected the values that stand side by side");
  int64_t sum = 0;
  for (size_t i = 0; i < ins.size(); ++i) {
    op.ins.push_back(value(ins[i]));
    if (op.ins[i] == op.out) ins.reject("in and out must differ");
    same_rows(ins, op.ins[i], op.out);
    sum += width(op.ins[i]);
  }
  if (sum != width(op.out)) {
    node["out"].reject("is ", width(op.out), " wide, what stands in it ", sum);
  }
  return op;
}

Op PlanReader::read_op(const JsonReader& node) {
  using Read = Op (PlanReader::*)(const JsonReader&);
  static const std::unordered_map<std::string, Read> kReaders = {
      {"embedding", &PlanReader::read_embedding},
      {"position_embedding", &PlanReader::read_position_embedding},
      {"norm", &PlanReader::read_norm},
      {"linear", &PlanReader::read_linear},
      {"rope", &PlanReader::read_rope_op},
      {"attention", &PlanReader::read_attention},
      {"activation", &PlanReader::read_activation},
      {"select", &PlanReader::read_select},
      {"add", &PlanReader::read_add},
      {"concat", &PlanReader::read_concat},
      {"route", &PlanReader::read_route},
      {"experts", &PlanReader::read_experts}};
  const std::string name = node["op"].string();
  const auto it = kReaders.find(name);
  if (it == kReaders.end()) node["op"].reject("unknown op \"", name, "\"");
  return (this->*it->second)(node);
}

}  // namespace helm
