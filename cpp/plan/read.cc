// A plan but for its tensors, units and ops: limits, KV, values, devices, schedule.
#include "helm/plan.h"

#include <algorithm>

#include "plan/reader.h"
#include "plan/stages.h"

namespace helm {

void PlanReader::read_limits(const JsonReader& node) {
  node.only({"context", "step_tokens", "step_outputs", "sequences"});
  plan_.limits.context = node["context"].integer(1, kMaxExtent);
  plan_.limits.step_tokens = node["step_tokens"].integer(1, kMaxCount);
  plan_.limits.step_outputs = node["step_outputs"].integer(1, plan_.limits.step_tokens);
  plan_.limits.sequences = node["sequences"].integer(1, plan_.limits.step_outputs);
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

void PlanReader::read_devices(const JsonReader& node) {
  plan_.devices.clear();
  if (node.size() == 0) node.reject("expected the CPU and what stands beside it");
  if (node.size() > kMostDevices) node.reject("expected at most ", kMostDevices, " devices");
  for (size_t i = 0; i < node.size(); ++i) {
    node[i].only({"name", "kind"});
    const std::string name = node[i]["name"].string(), kind = node[i]["kind"].string();
    const char* expected = i == 0 ? "cpu" : "accelerator";
    if (name.empty()) node[i]["name"].reject("expected a name");
    if (i == 0 && name != "cpu") node[i]["name"].reject("expected \"cpu\", found \"", name, "\"");
    if (kind != expected) {
      node[i]["kind"].reject("expected \"", expected, "\", found \"", kind,
                             "\"; the CPU is the first device and the only one of its kind");
    }
    if (!device_index_.emplace(name, static_cast<DeviceIndex>(i)).second) {
      node[i]["name"].reject("\"", name, "\" is listed twice");
    }
    plan_.devices.push_back({name, i == 0 ? DeviceKind::kCpu : DeviceKind::kAccelerator});
  }
  plan_.pages.assign(plan_.devices.size(), 0);
  plan_.memory_bytes.assign(plan_.devices.size(), Plan::kUnlimited);
}

DeviceIndex PlanReader::device(const JsonReader& node) const {
  const auto it = device_index_.find(node.string());
  if (it == device_index_.end()) node.reject("unknown device \"", node.string(), "\"");
  return it->second;
}

void PlanReader::by_name(const JsonReader& node) const {
  for (const std::string& name : node.names()) {
    if (!device_index_.contains(name)) node.reject("unknown device \"", name, "\"");
  }
}

// What the plan may take of each device's memory. An accelerator that it uses has an entry.
void PlanReader::read_memory(const JsonReader& node) {
  by_name(node);
  for (size_t d = 0; d < plan_.devices.size(); ++d) {
    const std::string& name = plan_.devices[d].name;
    if (!node.has(name) && (d == kCpu || !plan_.uses(static_cast<DeviceIndex>(d)))) continue;
    plan_.memory_bytes[d] = 0;
    for (const char* purpose : {"weights_bytes", "kv_bytes", "activations_bytes", "workspace_bytes",
                                "staging_bytes", "reserve_bytes"}) {
      plan_.memory_bytes[d] += node[name][purpose].integer(0, kMaxOffset);
    }
  }
}

// How devices work together, where several do.
void PlanReader::read_schedule(const JsonReader& schedule) {
  plan_.schedule.prefill_overlap = schedule["prefill_overlap"].boolean();
  plan_.schedule.decode_groups = schedule["decode_groups"].integer(1, 2);
  if (schedule.has("visit_buffers")) {
    plan_.schedule.visit_buffers = schedule["visit_buffers"].integer(2, kMostVisitBuffers);
  }
  const std::string prefill = schedule["prefill"].string();
  if (prefill == "visit") {
    plan_.schedule.visit_tokens = schedule["visit_tokens"].integer(1, kMaxExtent);
    plan_.schedule.visit_pages = schedule["visit_pages"].integer(1, kMaxExtent);
    check_kv_units(schedule["visit_pages"], plan_.schedule.visit_pages);
  } else if (prefill != "compute") {
    schedule["prefill"].reject("expected \"compute\" or \"visit\", found \"", prefill, "\"");
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
}

void PlanReader::read_pages(const JsonReader& node) {
  by_name(node);
  int64_t total = 0;
  for (size_t d = 0; d < plan_.devices.size(); ++d) {
    const std::string& name = plan_.devices[d].name;
    if (!node.has(name) && !plan_.uses(static_cast<DeviceIndex>(d))) continue;
    total += plan_.pages[d] = node[name].integer(0, kMaxExtent);
  }
  if (total != plan_.kv.pages()) {
    node.reject("the devices' pages do not add up to those of kv, ", plan_.kv.pages());
  }
  for (size_t d = kCpu + 1; plan_.kv.window_blocks > 0 && d < plan_.devices.size(); ++d) {
    const int64_t wanted = pages_on(static_cast<DeviceIndex>(d));
    if (plan_.pages[d] >= wanted) continue;
    node[plan_.devices[d].name].reject("expected all pages, ", wanted,
                                       ", of its KV entries where kv.window_blocks is not 0");
  }
}

// All pages of the KV entries on a device.
int64_t PlanReader::pages_on(DeviceIndex device) const {
  const std::vector<DeviceIndex> devices = entry_devices(plan_);
  int64_t count = 0;
  for (size_t entry = 0; entry < devices.size(); ++entry) {
    if (devices[entry] == device) count += plan_.kv.entry_pages(entry);
  }
  return count;
}

Plan PlanReader::read(const JsonReader& root) {
  root.only({"format", "version", "model", "limits", "threads", "devices", "kv", "rope", "tensors",
             "slices", "values", "units", "logits", "memory", "schedule", "predictor",
             // Written for people; nothing here is executed.
             "notices", "loading", "units_cpu", "units_accelerator", "units_cut", "label",
             "workload", "profile", "predicted", "bottleneck", "alternatives", "loading_choice"});
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
  read_devices(root["devices"]);
  read_kv(root["kv"]);
  const JsonReader rope = root["rope"];
  for (size_t i = 0; i < rope.size(); ++i) read_rope(rope[i]);
  const JsonReader tensors = root["tensors"];
  for (size_t i = 0; i < tensors.size(); ++i) read_tensor(tensors[i]);
  check_parts(tensors);
  const JsonReader slices = root["slices"];
  for (size_t i = 0; i < slices.size(); ++i) read_slice(slices[i]);
  const JsonReader values = root["values"];
  for (size_t i = 0; i < values.size(); ++i) read_value(values[i]);
  const JsonReader units = root["units"];
  for (size_t i = 0; i < units.size(); ++i) read_unit(units[i]);
  plan_.pages[kCpu] = plan_.kv.pages();
  // Layers visit an accelerator even where no unit lies on any.
  const bool visits = root.has("schedule") && root["schedule"]["prefill"].string() == "visit";
  check_ends(units);
  check_kv_entries(root["kv"], units, true);
  if (visits && plan_.devices.size() == 1) {
    root["schedule"]["prefill"].reject("there is no accelerator that layers could visit");
  }
  const bool several = visits || std::any_of(plan_.units.begin(), plan_.units.end(),
                                             [](const UnitSpec& u) { return u.device != kCpu; });
  if (several) {
    read_schedule(root["schedule"]);
    read_pages(root["schedule"]["pages"]);
    check_cut(root["schedule"]);
  }
  if (several || root.has("memory")) read_memory(root["memory"]);
  if (root.has("predictor")) read_predictor(root["predictor"]);
  plan_.logits = value(root["logits"]);
  check_logits(root["logits"]);
  if (plan_.schedule.visit_tokens > 0) check_visits(units);
  check_slices(slices);
  check_lacking(root);
  check_disk(root);
  check_experts(slices);
  check_visiting_formats(slices);
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
    units[i].only({"name", "kind", "layer", "ops"});
    read_ops(units[i], kCpu);
  }
  check_ends(units);
  check_kv_entries(root["kv"], units, false);
  check_logits(root["logits"]);
  return std::move(plan_);
}

bool Plan::uses(DeviceIndex device) const {
  return device == kCpu || (device == kFirstAccelerator && schedule.visit_tokens > 0) ||
         std::any_of(units.begin(), units.end(),
                     [&](const UnitSpec& unit) { return unit.device == device; });
}

}  // namespace helm
