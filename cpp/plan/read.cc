// A plan but for its ops: limits, KV, tensors, values, units, devices.
#include "helm/plan.h"

#include <algorithm>

#include "plan/reader.h"
#include "plan/stages.h"

namespace helm {
namespace {

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

void PlanReader::read_limits(const JsonReader& node) {
  node.only({"context", "step_tokens", "step_outputs", "sequences"});
  plan_.limits.context = node["context"].integer(1, kMaxExtent);
  plan_.limits.step_tokens = node["step_tokens"].integer(1, kMaxCount);
  plan_.limits.step_outputs = node["step_outputs"].integer(1, plan_.limits.step_tokens);
  plan_.limits.sequences = node["sequences"].integer(1, plan_.limits.step_outputs);
}

void PlanReader::read_kv(const JsonReader& node) {
  node.only({"dtype", "page_tokens", "layers", "kv_heads", "head_dim", "pages"});
  plan_.kv.dtype = named(node["dtype"], kv_dtype_from_name);
  plan_.kv.page_tokens = node["page_tokens"].integer(1, kMaxCount);
  read_kv_geometry(node);
  plan_.kv.pages = node["pages"].integer(1, kMaxExtent);
  if (plan_.kv.pages > kMaxOffset / plan_.kv.page_bytes()) node.reject("the pages exceed 64 TiB");
}

void PlanReader::read_kv_geometry(const JsonReader& node) {
  plan_.kv.layers = node["layers"].integer(1, kMaxCount);
  plan_.kv.kv_heads = node["kv_heads"].integer(1, 4096);
  plan_.kv.head_dim = node["head_dim"].integer(1, 4096);
}

void PlanReader::read_rope(const JsonReader& node) {
  node.only({"inv_freq", "attention_factor"});
  RopeTable table;
  const JsonReader list = node["inv_freq"];
  for (size_t i = 0; i < list.size(); ++i) table.inv_freq.push_back(list[i].number());
  table.attention_factor = node["attention_factor"].number();
  plan_.rope.push_back(std::move(table));
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

void PlanReader::read_unit(const JsonReader& node) {
  node.only({"name", "device", "ops"});
  std::string device = node["device"].string();
  if (device != "cpu" && device != "accelerator") {
    node["device"].reject("expected \"cpu\" or \"accelerator\", found \"", device, "\"");
  }
  read_ops(node, std::move(device));
}

void PlanReader::read_ops(const JsonReader& node, std::string device) {
  UnitSpec unit{node["name"].string(), std::move(device), {}};
  const JsonReader ops = node["ops"];
  for (size_t i = 0; i < ops.size(); ++i) unit.ops.push_back(read_op(ops[i]));
  if (std::count_if(unit.ops.begin(), unit.ops.end(), is_attention) > 1) {
    ops.reject("a unit has one attention op at most");
  }
  plan_.units.push_back(std::move(unit));
}

// Whether a plan without units on the accelerator lets blocks visit it.
bool PlanReader::visits(const JsonReader& root) {
  return root.has("schedule") && root["schedule"]["prefill"].string() == "stream";
}

// All that a plan may take of a device's memory.
int64_t PlanReader::memory_bytes(const JsonReader& node) {
  int64_t bytes = 0;
  for (const char* purpose : {"weights_bytes", "kv_bytes", "activations_bytes", "workspace_bytes",
                              "staging_bytes", "reserve_bytes"}) {
    bytes += node[purpose].integer(0, kMaxOffset);
  }
  return bytes;
}

// What a plan says of its accelerator: the memory it may take, its KV pages, the schedule.
void PlanReader::read_accelerator(const JsonReader& root) {
  plan_.accelerator_memory_bytes = memory_bytes(root["memory"]["accelerator"]);
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

// Blocks in host memory whose weights visit the accelerator: there is something to bring there, and
// the logits stay on the device of the head.
void PlanReader::check_visits(const JsonReader& units) const {
  const std::vector<bool> resident = resident_units(plan_);
  const std::vector<bool> visiting = visiting_units(plan_);
  for (size_t u = 0; u < visiting.size(); ++u) {
    if (resident[u] || !visiting[u]) continue;
    std::vector<bool> only(visiting.size(), false);
    only[u] = true;
    if (tensors_of(plan_, only).empty()) units[u].reject("visits the accelerator without tensors");
    if (u + 1 == visiting.size()) units[u].reject("visits the accelerator as the last unit");
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

Plan PlanReader::read(const JsonReader& root) {
  root.only({"format", "version", "model", "limits", "threads", "kv", "rope", "tensors", "slices",
             "values", "units", "logits", "memory", "schedule",
             // Written for people; nothing here is executed.
             "notices", "loading", "units_cpu", "units_accelerator", "label", "workload", "profile",
             "predicted", "bottleneck", "alternatives", "loading_choice"});
  if (root["version"].integer(0, kMaxCount) != Plan::kVersion) {
    root["version"].reject("this runtime executes version ", Plan::kVersion,
                           "; make the plan anew with the installed helm-llm");
  }
  const JsonReader model = root["model"];
  plan_.architecture = model["architecture"].string();
  plan_.fingerprint = model["fingerprint"].string();
  plan_.vocab_size = model["vocab_size"].integer(1, kMaxWidth);
  read_limits(root["limits"]);
  plan_.threads = static_cast<int>(root["threads"].integer(1, kMostThreads));
  read_kv(root["kv"]);
  const JsonReader rope = root["rope"];
  for (size_t i = 0; i < rope.size(); ++i) read_rope(rope[i]);
  const JsonReader tensors = root["tensors"];
  for (size_t i = 0; i < tensors.size(); ++i) read_tensor(tensors[i]);
  const JsonReader slices = root["slices"];
  for (size_t i = 0; i < slices.size(); ++i) read_slice(slices[i]);
  const JsonReader values = root["values"];
  for (size_t i = 0; i < values.size(); ++i) read_value(values[i]);
  const JsonReader units = root["units"];
  for (size_t i = 0; i < units.size(); ++i) read_unit(units[i]);
  if (root.has("memory") && root["memory"].has("cpu")) {
    plan_.cpu_memory_bytes = memory_bytes(root["memory"]["cpu"]);
  }
  if (plan_.uses_accelerator() || visits(root)) read_accelerator(root);
  plan_.logits = value(root["logits"]);
  check_logits(root["logits"]);
  if (plan_.schedule.stream_tokens > 0) check_visits(units);
  check_slices(slices);
  if (plan_.schedule.stream_tokens > 0) check_visiting_formats(slices);
  return std::move(plan_);
}

Plan PlanReader::read_graph(const JsonReader& root) {
  root.only({"kv", "rope", "tensors", "values", "units", "logits"});
  plan_.limits = {.context = 1, .step_tokens = 1, .step_outputs = 1, .sequences = 1};
  root["kv"].only({"layers", "kv_heads", "head_dim"});
  read_kv_geometry(root["kv"]);
  plan_.kv.page_tokens = 1;
  const JsonReader rope = root["rope"];
  for (size_t i = 0; i < rope.size(); ++i) read_rope(rope[i]);
  const JsonReader tensors = root["tensors"];
  for (size_t i = 0; i < tensors.size(); ++i) read_tensor(tensors[i]);
  const JsonReader values = root["values"];
  for (size_t i = 0; i < values.size(); ++i) read_value(values[i]);
  plan_.logits = value(root["logits"]);
  plan_.vocab_size = width(plan_.logits);
  const JsonReader units = root["units"];
  for (size_t i = 0; i < units.size(); ++i) {
    units[i].only({"name", "ops"});
    read_ops(units[i], "cpu");
  }
  check_logits(root["logits"]);
  return std::move(plan_);
}

bool Plan::uses_accelerator() const {
  return schedule.stream_tokens > 0 ||
         std::any_of(units.begin(), units.end(),
                     [](const UnitSpec& unit) { return unit.device == "accelerator"; });
}

}  // namespace helm
