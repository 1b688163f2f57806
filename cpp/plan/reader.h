// Reads a plan from JSON and checks it: everything the runtime relies on is established here.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/json_reader.h"
#include "helm/plan.h"

namespace helm {

// Bounds no real model exceeds, small enough that products of three stay within 64 bits.
inline constexpr int64_t kMaxExtent = int64_t{1} << 31;
inline constexpr int64_t kMaxWidth = int64_t{1} << 24;
inline constexpr int64_t kMaxCount = int64_t{1} << 20;
inline constexpr int kMostThreads = 4096;
inline constexpr size_t kMostDevices = 16;
inline constexpr int64_t kMaxOffset = int64_t{1} << 46;

inline constexpr int64_t kMostVisitBuffers = 64;

inline constexpr const char* kPlanFormat = "helm-plan";

// What `from_name` says of a name; its error is one of the node.
template <typename FromName>
auto named(const JsonReader& node, const FromName& from_name) {
  const std::string name = node.string();
  try {
    return from_name(name);
  } catch (const Error& error) {
    node.reject(error.what());
  }
}

// Reads one plan. Throws Error{kInvalid} that names the field.
class PlanReader {
 public:
  Plan read(const JsonReader& root);
  // The part of a plan that is the model's: KV geometry, rope, tensors, values, units, logits.
  Plan read_graph(const JsonReader& root);

 private:
  void read_limits(const JsonReader& node);
  void read_kv(const JsonReader& node);
  void read_kv_geometry(const JsonReader& node);
  void read_window_blocks(const JsonReader& node);
  void check_kv_layers(const JsonReader& node) const;
  void check_kv_units(const JsonReader& node, int64_t pages) const;
  void check_kv_entries(const JsonReader& kv, const JsonReader& units, bool all) const;
  void read_rope(const JsonReader& node);
  void read_devices(const JsonReader& node);
  DeviceIndex device(const JsonReader& node) const;  // of that name
  void read_tensor(const JsonReader& node);
  static TensorPart read_part(const JsonReader& node, const TensorSpec& spec);
  static void check_cut_columns(const JsonReader& node, const TensorSpec& spec);
  static TensorSource read_source(const JsonReader& node, const TensorSpec& spec);
  static TensorSource read_pieces(const JsonReader& node, const TensorSpec& spec, Stored stored);
  static SourcePiece read_piece(const JsonReader& node);
  static SourceExtent read_extent(const JsonReader& node, int64_t row_bytes);
  void read_slice(const JsonReader& node);
  void check_slice(const JsonReader& node, const SliceSpec& slice) const;
  void check_slices(const JsonReader& slices);
  void check_disk_slice(const JsonReader& access, const SliceSpec& slice) const;
  void check_disk(const JsonReader& root);
  void check_experts(const JsonReader& slices) const;
  void check_visiting_formats(const JsonReader& slices) const;
  void read_value(const JsonReader& node);
  void read_unit(const JsonReader& node);
  void read_ops(const JsonReader& node, DeviceIndex device);  // of a unit
  void check_unit(const JsonReader& node, const UnitSpec& unit) const;
  void read_memory(const JsonReader& node);
  void read_schedule(const JsonReader& node);
  void read_pages(const JsonReader& node);
  void read_predictor(const JsonReader& node);
  int64_t pages_on(DeviceIndex device) const;
  void by_name(const JsonReader& node) const;  // rejects names of no device
  void check_ends(const JsonReader& units) const;
  void check_visits(const JsonReader& units) const;
  void check_lacking(const JsonReader& root) const;
  void check_cut(const JsonReader& schedule) const;
  void check_parts(const JsonReader& tensors);  // and finds their wholes
  void check_logits(const JsonReader& node) const;
  Op read_op(const JsonReader& node);
  Op read_embedding(const JsonReader& node);
  Op read_position_embedding(const JsonReader& node);
  Op read_norm(const JsonReader& node);
  Op read_linear(const JsonReader& node);
  Op read_rope_op(const JsonReader& node);
  Op read_attention(const JsonReader& node);
  Op read_activation(const JsonReader& node);
  Op read_select(const JsonReader& node);
  Op read_add(const JsonReader& node);
  Op read_concat(const JsonReader& node);
  Op read_route(const JsonReader& node);
  Op read_experts(const JsonReader& node);
  static ActivationKind activation_kind(const JsonReader& node);

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
  std::unordered_map<std::string, DeviceIndex> device_index_;
  std::unordered_map<std::string, TensorIndex> tensor_index_;
  std::unordered_map<std::string, ValueIndex> value_index_;
  std::unordered_set<std::string> unit_names_;
};

}  // namespace helm
