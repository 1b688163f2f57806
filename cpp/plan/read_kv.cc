// A plan's KV cache: its geometry, its entries, and the attention that each of them serves.
#include <limits>

#include "plan/reader.h"

namespace helm {

void PlanReader::read_kv(const JsonReader& node) {
  node.only({"dtype", "page_tokens", "layers", "kv_heads", "head_dim", "blocks", "window_blocks"});
  plan_.kv.dtype = named(node["dtype"], kv_dtype_from_name);
  plan_.kv.page_tokens = node["page_tokens"].integer(1, kMaxCount);
  read_kv_geometry(node);
  plan_.kv.blocks = node["blocks"].integer(1, kMaxExtent / plan_.kv.entries());
  if (node.has("window_blocks")) read_window_blocks(node["window_blocks"]);
  if (plan_.kv.pages() > kMaxOffset / (plan_.kv.kv_heads * plan_.kv.unit_bytes())) {
    node.reject("the pages exceed 64 TiB");
  }
  check_kv_units(node["blocks"], plan_.kv.pages());
}

// Where pages before a window are given up, there are those that windows and steps fill.
void PlanReader::read_window_blocks(const JsonReader& node) {
  const int64_t count = node.integer(0, kMaxExtent);
  if (count == 0) return;
  if (plan_.kv.window() == 0) node.reject("is ", count, ", but no entry of kv.layers has a window");
  const int64_t least =
      plan_.kv.most_window_blocks(plan_.limits.step_tokens, plan_.limits.sequences);
  if (count < least || count >= plan_.kv.blocks) {
    node.reject("expected ", least, " to less than kv.blocks, ", plan_.kv.blocks, ", found ", count,
                "; or 0, to keep all positions");
  }
  plan_.kv.window_blocks = count;
}

void PlanReader::read_kv_geometry(const JsonReader& node) {
  plan_.kv.kv_heads = node["kv_heads"].integer(1, 4096);
  plan_.kv.head_dim = node["head_dim"].integer(1, 4096);
  const JsonReader layers = node["layers"];
  if (layers.size() == 0) layers.reject("expected an entry for each layer, found none");
  if (static_cast<int64_t>(layers.size()) > kMaxCount) {
    layers.reject("has ", layers.size(), " entries, expected at most ", kMaxCount);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].only({"layer", "kv_head", "kv_heads", "window"});
    plan_.kv.layers.push_back(
        {layers[i]["layer"].integer(0, kMaxCount),
         layers[i]["kv_head"].integer(0, plan_.kv.kv_heads - 1),
         layers[i]["kv_heads"].integer(1, plan_.kv.kv_heads),
         layers[i].has("window") ? layers[i]["window"].integer(1, kMaxExtent) : 0});
  }
  check_kv_layers(layers);
}

// Layers ascend, and the entries of each cover its heads in order, every head once.
void PlanReader::check_kv_layers(const JsonReader& node) const {
  int64_t layer = -1, end = plan_.kv.kv_heads;  // of the heads that the layer's entries cover
  const auto check_whole = [&](const JsonReader& entry) {
    if (end == plan_.kv.kv_heads) return;
    entry.reject("KV heads from ", end, " on of layer ", layer, " lie in no entry");
  };
  for (size_t i = 0; i < plan_.kv.layers.size(); ++i) {
    const KvLayer& entry = plan_.kv.layers[i];
    if (entry.layer < layer) {
      node[i]["layer"].reject("layer ", entry.layer, " comes after layer ", layer,
                              "; layers ascend");
    }
    if (entry.layer != layer) {
      if (i > 0) check_whole(node[i - 1]["kv_heads"]);
      layer = entry.layer;
      end = 0;
    }
    if (entry.kv_head != end) {
      const bool gap = entry.kv_head > end;
      node[i]["kv_head"].reject("KV heads from ", gap ? end : entry.kv_head, " on of layer ", layer,
                                gap ? " lie in no entry" : " lie in two entries", "; expected ",
                                end);
    }
    end += entry.kv_heads;
    if (end > plan_.kv.kv_heads) {
      node[i]["kv_heads"].reject("the entries of layer ", layer, " have ", end,
                                 " KV heads, the model ", plan_.kv.kv_heads);
    }
  }
  check_whole(node[plan_.kv.layers.size() - 1]["kv_heads"]);
}

// Tables of pages have 32 bits for the place of each.
void PlanReader::check_kv_units(const JsonReader& node, int64_t pages) const {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (pages <= kMost / plan_.kv.kv_heads) return;
  node.reject(pages, " pages of ", plan_.kv.kv_heads, " KV heads are more than ", kMost, " in all");
}

// Each entry has one attention op, which is in a unit of its layer; at most one of a graph, which
// may have some of the model's units.
void PlanReader::check_kv_entries(const JsonReader& kv, const JsonReader& units, bool all) const {
  std::vector<bool> read(plan_.kv.layers.size(), false);
  for (size_t u = 0; u < plan_.units.size(); ++u) {
    const std::vector<Op>& ops = plan_.units[u].ops;
    for (size_t o = 0; o < ops.size(); ++o) {
      const auto* attention = std::get_if<AttentionOp>(&ops[o]);
      if (attention == nullptr) continue;
      const auto entry = static_cast<size_t>(attention->layer);
      const JsonReader field = units[u]["ops"][o]["layer"];
      if (plan_.kv.layers[entry].layer != plan_.units[u].layer) {
        field.reject("KV entry ", entry, " is of layer ", plan_.kv.layers[entry].layer,
                     ", the unit of layer ", plan_.units[u].layer);
      }
      const KvLayer& held = plan_.kv.layers[entry];
      if (held.window != attention->window) {
        units[u]["ops"][o]["window"].reject("is ", attention->window, ", KV entry ", entry, " has ",
                                            held.window);
      }
      if (read[entry]) field.reject("KV entry ", entry, " has two attention ops");
      read[entry] = true;
    }
  }
  for (size_t entry = 0; all && entry < read.size(); ++entry) {
    if (!read[entry]) kv["layers"][entry].reject("no attention op has this entry");
  }
}

}  // namespace helm
