// Parsing and checking a plan. Everything the runtime relies on is established here.
#include "helm/plan.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "base/json_reader.h"

namespace helm {
namespace {

// Bounds no real model exceeds, small enough that products of three stay within 64 bits.
constexpr int64_t kMaxExtent = int64_t{1} << 31;
constexpr int64_t kMaxWidth = int64_t{1} << 24;
constexpr int64_t kMaxCount = int64_t{1} << 20;
constexpr int64_t kMaxOffset = int64_t{1} << 46;

class PlanReader {
 public:
  Plan read(const JsonReader& root);

 private:
  void read_limits(const JsonReader& node);
  void read_kv(const JsonReader& node);
  void read_rope(const JsonReader& node);
  void read_tensor(const JsonReader& node);
  void read_value(const JsonReader& node);
  void read_unit(const JsonReader& node);
  static WeightLoading read_loading(const JsonReader& node);
  static bool streams(const JsonReader& root);
  void read_accelerator(const JsonReader& root);
  Op read_op(const JsonReader& node);
  Op read_embedding(const JsonReader& node);
  Op read_position_embedding(const JsonReader& node);
  Op read_norm(const JsonReader& node);
  Op read_linear(const JsonReader& node);
  Op read_rope_op(const JsonReader& node);
  Op read_attention(const JsonReader& node);
  Op read_activation(const JsonReader& node);
  Op read_select(const JsonReader& node);

  TensorIndex matrix(const JsonReader& node, int64_t rows, int64_t cols) const;  // -1: any
  TensorIndex vector(const JsonReader& node, int64_t size) const;
  TensorIndex optional_vector(const JsonReader& node, int64_t size) const;
  TensorIndex tensor(const JsonReader& node) const;
  ValueIndex value(const JsonReader& node) const;
  int64_t width(ValueIndex index) const { return plan_.values[static_cast<size_t>(index)].width; }
  bool per_output(ValueIndex index) const {
    return plan_.values[static_cast<size_t>(index)].per_output;
  }
  void same_rows(const JsonReader& node, ValueIndex a, ValueIndex b) const;
  void per_token(const JsonReader& node, ValueIndex index) const;
  void within(const JsonReader& node, ValueIndex index, int64_t offset, int64_t size) const;

  Plan plan_;
  std::unordered_map<std::string, TensorIndex> tensor_index_;
  std::unordered_map<std::string, ValueIndex> value_index_;
};

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

void PlanReader::read_limits(const JsonReader& node) {
  node.only({"context", "step_tokens", "step_outputs", "sequences"});
  plan_.limits.context = node["context"].integer(1, kMaxExtent);
  plan_.limits.step_tokens = node["step_tokens"].integer(1, kMaxCount);
  plan_.limits.step_outputs = node["step_outputs"].integer(1, plan_.limits.step_tokens);
  plan_.limits.sequences = node["sequences"].integer(1, plan_.limits.step_outputs);
}

void PlanReader::read_kv(const JsonReader& node) {
  node.only({"dtype", "page_tokens", "layers", "kv_heads", "head_dim", "pages"});
  plan_.kv.dtype = kv_dtype_from_name(node["dtype"].string());
  plan_.kv.page_tokens = node["page_tokens"].integer(1, kMaxCount);
  plan_.kv.layers = node["layers"].integer(1, kMaxCount);
  plan_.kv.kv_heads = node["kv_heads"].integer(1, 4096);
  plan_.kv.head_dim = node["head_dim"].integer(1, 4096);
  plan_.kv.pages = node["pages"].integer(1, kMaxExtent);
  if (plan_.kv.pages > kMaxOffset / plan_.kv.page_bytes()) node.reject("the pages exceed 64 TiB");
}

void PlanReader::read_rope(const JsonReader& node) {
  node.only({"inv_freq", "attention_factor"});
  RopeTable table;
  const JsonReader list = node["inv_freq"];
  for (size_t i = 0; i < list.size(); ++i) table.inv_freq.push_back(list[i].number());
  table.attention_factor = node["attention_factor"].number();
  plan_.rope.push_back(std::move(table));
}

void PlanReader::read_tensor(const JsonReader& node) {
  node.only({"name", "shape", "dtype", "source"});
  TensorSpec spec;
  spec.name = node["name"].string();
  const JsonReader shape = node["shape"];
  if (shape.size() != 1 && shape.size() != 2) shape.reject("expected one or two dimensions");
  for (size_t i = 0; i < shape.size(); ++i) spec.shape.push_back(shape[i].integer(1, kMaxExtent));
  if (spec.shape.back() > kMaxWidth) shape.reject("the last dimension exceeds ", kMaxWidth);
  spec.dtype = dtype_from_name(node["dtype"].string());
  if (spec.shape.size() == 1 && spec.dtype != DType::kF32) {
    node["dtype"].reject("vectors are placed as f32");
  }
  if (const JsonReader source = node["source"]; !source.is_null()) {
    source.only({"file", "offset", "dtype"});
    spec.source = TensorSource{source["file"].string(), source["offset"].integer(0, kMaxOffset),
                               dtype_from_name(source["dtype"].string())};
    const std::string& file = spec.source->file;
    if (file.empty() || file.front() == '/' ||
        ("/" + file + "/").find("/../") != std::string::npos) {
      source["file"].reject("\"", file, "\" leaves the model directory");
    }
  }
  if (!tensor_index_.emplace(spec.name, static_cast<TensorIndex>(plan_.tensors.size())).second) {
    node["name"].reject("\"", spec.name, "\" is listed twice");
  }
  plan_.tensors.push_back(std::move(spec));
}

void PlanReader::read_value(const JsonReader& node) {
  node.only({"name", "width", "rows"});
  ValueSpec spec;
  spec.name = node["name"].string();
  spec.width = node["width"].integer(1, kMaxWidth);
  const std::string rows = node["rows"].string();
  if (rows != "tokens" && rows != "outputs") {
    node["rows"].reject("expected \"tokens\" or \"outputs\", found \"", rows, "\"");
  }
  spec.per_output = rows == "outputs";
  if (!value_index_.emplace(spec.name, static_cast<ValueIndex>(plan_.values.size())).second) {
    node["name"].reject("\"", spec.name, "\" is listed twice");
  }
  plan_.values.push_back(std::move(spec));
}

Op PlanReader::read_embedding(const JsonReader& node) {
  node.only({"op", "table", "out"});
  EmbeddingOp op{};
  op.out = value(node["out"]);
  per_token(node, op.out);
  op.table = matrix(node["table"], plan_.vocab_size, width(op.out));
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
             "bias", "eps"});
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
  node.only({"op", "value", "offset", "heads", "head_dim", "rotary", "table"});
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
  return op;
}

Op PlanReader::read_attention(const JsonReader& node) {
  node.only({"op", "in", "q_offset", "k_offset", "v_offset", "out", "layer", "heads", "kv_heads",
             "head_dim", "scale", "window"});
  AttentionOp op{};
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  if (op.in == op.out) node.reject("in and out must differ");
  per_token(node, op.in);
  per_token(node, op.out);
  op.q_offset = node["q_offset"].integer(0, kMaxWidth);
  op.k_offset = node["k_offset"].integer(0, kMaxWidth);
  op.v_offset = node["v_offset"].integer(0, kMaxWidth);
  op.layer = node["layer"].integer(0, plan_.kv.layers - 1);
  op.heads = node["heads"].integer(1, kMaxCount);
  op.kv_heads = node["kv_heads"].integer(plan_.kv.kv_heads, plan_.kv.kv_heads);
  op.head_dim = node["head_dim"].integer(plan_.kv.head_dim, plan_.kv.head_dim);
  if (op.heads % op.kv_heads != 0) node["heads"].reject("must be a multiple of kv_heads");
  within(node, op.in, op.q_offset, op.heads * op.head_dim);
  within(node, op.in, op.k_offset, op.kv_heads * op.head_dim);
  within(node, op.in, op.v_offset, op.kv_heads * op.head_dim);
  if (width(op.out) != op.heads * op.head_dim) node["out"].reject("must be heads * head_dim wide");
  op.scale = node["scale"].number();
  op.window = node["window"].integer(0, kMaxExtent);
  return op;
}

Op PlanReader::read_activation(const JsonReader& node) {
  node.only({"op", "kind", "gated", "in", "out", "size"});
  static const std::unordered_map<std::string, ActivationKind> kKinds = {
      {"silu", ActivationKind::kSilu},
      {"gelu", ActivationKind::kGelu},
      {"gelu_tanh", ActivationKind::kGeluTanh},
      {"relu", ActivationKind::kRelu}};
  ActivationOp op{};
  const auto kind = kKinds.find(node["kind"].string());
  if (kind == kKinds.end()) node["kind"].reject("expected silu, gelu, gelu_tanh or relu");
  op.kind = kind->second;
  op.gated = node["gated"].boolean();
  op.in = value(node["in"]);
  op.out = value(node["out"]);
  same_rows(node, op.in, op.out);
  op.size = node["size"].integer(1, kMaxWidth);
  if (width(op.in) != (op.gated ? 2 : 1) * op.size) node["in"].reject("has the wrong width");
  if (op.in != op.out && width(op.out) != op.size) node["out"].reject("has the wrong width");
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
      {"select", &PlanReader::read_select}};
  const std::string name = node["op"].string();
  const auto it = kReaders.find(name);
  if (it == kReaders.end()) node["op"].reject("unknown op \"", name, "\"");
  return (this->*it->second)(node);
}

void PlanReader::read_unit(const JsonReader& node) {
  node.only({"name", "device", "ops"});
  UnitSpec unit;
  unit.name = node["name"].string();
  unit.device = node["device"].string();
  if (unit.device != "cpu" && unit.device != "accelerator") {
    node["device"].reject("expected \"cpu\" or \"accelerator\", found \"", unit.device, "\"");
  }
  const JsonReader ops = node["ops"];
  for (size_t i = 0; i < ops.size(); ++i) unit.ops.push_back(read_op(ops[i]));
  plan_.units.push_back(std::move(unit));
}

WeightLoading PlanReader::read_loading(const JsonReader& node) {
  const std::string loading = node.string();
  if (loading != "copied" && loading != "mapped") {
    node.reject("expected \"copied\" or \"mapped\", found \"", loading, "\"");
  }
  return loading == "mapped" ? WeightLoading::kMapped : WeightLoading::kCopied;
}

// Whether a plan without units on the accelerator lets blocks visit it.
bool PlanReader::streams(const JsonReader& root) {
  return root.has("schedule") && root["schedule"]["prefill"].string() == "stream";
}

// What a plan says of its accelerator: the memory it may take, its KV pages, the schedule.
void PlanReader::read_accelerator(const JsonReader& root) {
  const JsonReader memory = root["memory"]["accelerator"];
  for (const char* purpose : {"weights_bytes", "kv_bytes", "activations_bytes", "workspace_bytes",
                              "staging_bytes", "reserve_bytes"}) {
    plan_.accelerator_memory_bytes += memory[purpose].integer(0, kMaxOffset);
  }
  const JsonReader schedule = root["schedule"];
  plan_.schedule.prefill_overlap = schedule["prefill_overlap"].boolean();
  plan_.schedule.decode_groups = schedule["decode_groups"].integer(1, 2);
  const std::string prefill = schedule["prefill"].string();
  if (prefill == "stream") {
    plan_.schedule.stream_tokens = schedule["stream_tokens"].integer(1, kMaxExtent);
    plan_.schedule.stream_pages = schedule["stream_pages"].integer(1, kMaxExtent);
  } else if (prefill != "compute") {
    schedule["prefill"].reject("expected \"compute\" or \"stream\", found \"", prefill, "\"");
  }
  const std::string overflow = schedule["overflow"].string();
  if (overflow != "stream" && overflow != "cpu") {
    schedule["overflow"].reject("expected \"stream\" or \"cpu\", found \"", overflow, "\"");
  }
  plan_.schedule.overflow =
      overflow == "cpu" ? Schedule::Overflow::kCpu : Schedule::Overflow::kStream;
  if (schedule.has("watermark")) {
    plan_.schedule.watermark = schedule["watermark"].number();
    if (plan_.schedule.watermark < 0 || plan_.schedule.watermark > 1) {
      schedule["watermark"].reject("expected a share from 0 to 1");
    }
  }
  const JsonReader pages = schedule["pages"];
  const int64_t own = pages["accelerator"].integer(0, kMaxExtent);
  if (pages["cpu"].integer(0, kMaxExtent) + own != plan_.kv.pages) {
    pages.reject("the devices' pages do not add up to kv.pages, ", plan_.kv.pages);
  }
  plan_.accelerator_pages = own;
}

Plan PlanReader::read(const JsonReader& root) {
  root.only({"format", "version", "model", "limits", "threads", "kv", "rope", "tensors", "values",
             "units", "logits", "memory", "notices", "schedule", "loading",
             // Written for people; nothing here is executed.
             "units_cpu", "units_accelerator", "label", "workload", "profile", "predicted",
             "bottleneck", "alternatives", "loading_choice"});
  if (root["format"].string() != "helm-plan") root["format"].reject("this is not a HELM plan");
  if (root["version"].integer(0, kMaxCount) != Plan::kVersion) {
    root["version"].reject("this runtime executes version ", Plan::kVersion,
                           "; make the plan anew with the installed helm-llm");
  }
  const JsonReader model = root["model"];
  plan_.architecture = model["architecture"].string();
  plan_.fingerprint = model["fingerprint"].string();
  plan_.vocab_size = model["vocab_size"].integer(1, kMaxWidth);
  read_limits(root["limits"]);
  plan_.threads = static_cast<int>(root["threads"].integer(1, 4096));
  read_kv(root["kv"]);
  const JsonReader rope = root["rope"];
  for (size_t i = 0; i < rope.size(); ++i) read_rope(rope[i]);
  const JsonReader tensors = root["tensors"];
  for (size_t i = 0; i < tensors.size(); ++i) read_tensor(tensors[i]);
  const JsonReader values = root["values"];
  for (size_t i = 0; i < values.size(); ++i) read_value(values[i]);
  const JsonReader units = root["units"];
  for (size_t i = 0; i < units.size(); ++i) read_unit(units[i]);
  if (plan_.uses_accelerator() || streams(root)) read_accelerator(root);
  plan_.loading = read_loading(root["loading"]);
  plan_.logits = value(root["logits"]);
  if (!per_output(plan_.logits) || width(plan_.logits) != plan_.vocab_size) {
    root["logits"].reject("must be a value of width vocab_size with rows \"outputs\"");
  }
  return std::move(plan_);
}

}  // namespace

int64_t TensorSpec::elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

bool Plan::uses_accelerator() const {
  return schedule.stream_tokens > 0 ||
         std::any_of(units.begin(), units.end(),
                     [](const UnitSpec& unit) { return unit.device == "accelerator"; });
}

Plan Plan::from_json(std::string_view json) {
  nlohmann::json document;
  try {
    document = nlohmann::json::parse(json);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kInvalid, "[plan] not valid JSON: ", error.what());
  }
  return PlanReader().read(JsonReader(document, "plan"));
}

}  // namespace helm
