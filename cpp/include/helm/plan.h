// The execution plan: what the native runtime is told to run, and where. Parsed from JSON that is
// checked as hostile input; once a Plan exists, every index in it is valid and every shape agrees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "helm/format.h"
#include "helm/ops.h"
#include "helm/predictor.h"
#include "helm/stored.h"
#include "helm/types.h"

namespace helm {

// A run of a tensor's rows in a file.
struct SourceExtent {
  std::string file;        // relative to the model directory
  int64_t offset = 0;      // of the first row, bytes from the start of the file
  int64_t rows = 0;        // of a vector: elements
  int64_t row_stride = 0;  // bytes from row to row; 0: they adjoin

  bool operator==(const SourceExtent&) const = default;
};

// A tensor of a checkpoint that is a part of a matrix: its integers, its scales, ...
struct SourcePiece {
  std::string name;   // as helm/encode.h calls it
  std::string dtype;  // likewise
  std::vector<int64_t> shape;
  std::string file;  // relative to the model directory
  int64_t offset = 0;

  int64_t bytes() const {
    int64_t bytes = piece_element_bytes(dtype);
    for (const int64_t size : shape) bytes *= size;
    return bytes;
  }
  bool operator==(const SourcePiece&) const = default;
};

// Where a tensor lies in the model directory: extents that follow one another, or pieces, and how
// they are encoded.
struct TensorSource {
  Stored stored = Stored::kF32;
  std::vector<SourceExtent> extents;
  std::vector<SourcePiece> aux;

  bool operator==(const TensorSource&) const = default;
};

// A rectangle of a checkpoint's tensor: rows from `row` on, columns from `col` on.
struct TensorPart {
  std::string tensor;          // its name
  std::vector<int64_t> shape;  // of all of it
  int64_t row = 0;
  int64_t col = 0;                // 0 of a vector
  TensorIndex whole = kNoTensor;  // where the plan has all of it, too
};

// A weight that the model has.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;          // [rows, cols] or [size]
  std::optional<TensorSource> source;  // absent: bound from memory; of a part: of all of its tensor
  std::optional<TensorPart> part;      // which this is, of a tensor on several devices

  bool is_matrix() const { return shape.size() == 2; }
  // A vector counts as a matrix of one column.
  int64_t rows() const { return shape[0]; }
  int64_t cols() const { return is_matrix() ? shape[1] : 1; }
};

// How the stages of several devices run together.
struct Schedule {
  bool prefill_overlap =
      false;                  // the CPU works on a step while the accelerator is at the one before
  int64_t decode_groups = 1;  // decoding sequences take turns in so many groups, likewise
  // Steps of at least so many tokens (0: none) run the layers that lie in host memory on the
  // first accelerator: their weights visit it one layer after the other, and their KV with them, in
  // so many pages there.
  int64_t visit_tokens = 0;
  int64_t visit_pages = 0;
  // What visits an accelerator comes into so many buffers there, in turn: see lacking_units(), too.
  int64_t visit_buffers = 2;
  // KV blocks of accelerator layers beyond what fits there lie in host memory, the oldest first,
  // once more than this share of the slots there is in use. In decode their pages visit the
  // accelerator or the CPU attends to them; in prefill they visit.
  enum class Overflow : uint8_t { kStream, kCpu };
  Overflow overflow = Overflow::kStream;
  double watermark = 0.8;
  // Slices on disk pass through so much memory, unit by unit and around; 0 where there are none.
  int64_t disk_ring_bytes = 0;
};

enum class DeviceKind : uint8_t { kCpu, kAccelerator };

// A device's place in Plan::devices. The first is the CPU.
using DeviceIndex = int32_t;
inline constexpr DeviceIndex kCpu = 0;

// A device that the plan may use, by the name that the plan's text has for it.
struct DeviceSpec {
  std::string name;
  DeviceKind kind = DeviceKind::kCpu;
};

// A tensor as one device holds it.
struct SliceSpec {
  // Resident: in the device's memory. Mapped: read from the page cache where its file lies there;
  // starts at once, shared by processes, some percent slower to read because its pages are small.
  // Disk: read from its file in every step; takes no memory of its own.
  // A tensor bound from memory is used where it lies if its dtype is the format, whatever this
  // says.
  enum class Access : uint8_t { kResident, kMapped, kDisk };

  TensorIndex tensor = 0;
  DeviceIndex device = kCpu;
  Format format;  // f32 of a vector
  Access access = Access::kResident;
  int node = -1;  // the memory node on which the CPU's copy lies; -1: where its reader is
};

// An activation buffer, [tokens, width] or [outputs, width], f32.
struct ValueSpec {
  std::string name;
  int64_t width = 0;
  bool per_output = false;  // one row per requested logits row instead of one per token
};

// What a unit is of: a layer has an attention and an MLP, each one unit or several.
enum class UnitKind : uint8_t { kEmbedding, kAttention, kMlp, kHead };

// The smallest thing that is placed.
struct UnitSpec {
  static constexpr int64_t kNoLayer = -1;

  std::string name;
  UnitKind kind = UnitKind::kEmbedding;
  int64_t layer = kNoLayer;  // of an attention or MLP
  DeviceIndex device = kCpu;
  std::vector<Op> ops;
};

struct RopeTable {
  std::vector<float> inv_freq;  // [rotary / 2], radians per position
  float attention_factor = 1;   // multiplies cos and sin
};

// The KV heads of one layer whose pages lie side by side: all of the layer's, or a run of them.
struct KvLayer {
  int64_t layer = 0;
  int64_t kv_head = 0;  // the first
  int64_t kv_heads = 0;
  int64_t window = 0;  // positions that its attention sees, the last ones; 0: all

  bool operator==(const KvLayer&) const = default;
};

struct KvSpec {
  DType dtype = DType::kF32;
  int64_t page_tokens = 0;
  std::vector<KvLayer>
      layers;            // the entries of a layer stand together and cover its heads in order
  int64_t kv_heads = 0;  // of the model's layers
  int64_t head_dim = 0;
  int64_t blocks = 0;  // pages of an entry: K and V of page_tokens positions of one sequence each
  // Pages of an entry with a window, where those that lie before it are given up; 0: all are kept.
  int64_t window_blocks = 0;

  // A slab is K or V of one head: its rows and, if the dtype has scales, theirs, aligned.
  int64_t row_bytes() const { return head_dim * dtype_bytes(dtype); }
  int64_t rows_bytes() const {
    const int64_t bytes = page_tokens * row_bytes();
    return kv_scale_bytes(dtype) > 0 ? (bytes + 3) / 4 * 4 : bytes;
  }
  int64_t slab_bytes() const { return rows_bytes() + page_tokens * kv_scale_bytes(dtype); }
  // Pages are counted in units of two slabs. A page of an entry takes one for each of its heads: K
  // of all heads, then V.
  int64_t unit_bytes() const { return 2 * slab_bytes(); }
  int64_t page_units(size_t entry) const { return layers[entry].kv_heads; }
  int64_t page_bytes(size_t entry) const { return page_units(entry) * unit_bytes(); }
  // Where the page of an entry begins in a room of one layer's pages, of block after block.
  int64_t visiting_unit(size_t entry, int64_t block) const {
    return block * kv_heads + layers[entry].kv_head;
  }
  // A block: a page of each entry, however the layers' heads are divided into entries.
  int64_t model_layers() const { return layers.empty() ? 0 : layer_number(layers.size() - 1) + 1; }
  // Of the layers that have KV, the place of an entry's.
  int64_t layer_number(size_t entry) const {
    int64_t number = 0;
    for (size_t e = 1; e <= entry; ++e) number += layers[e].kv_head == 0;
    return number;
  }
  int64_t block_bytes() const { return model_layers() * kv_heads * unit_bytes(); }
  int64_t entries() const { return static_cast<int64_t>(layers.size()); }
  // Whether an entry's pages are given up once they lie before its window.
  bool leaves(size_t entry) const { return window_blocks > 0 && layers[entry].window > 0; }
  int64_t entry_pages(size_t entry) const { return leaves(entry) ? window_blocks : blocks; }
  int64_t pages() const {
    int64_t count = 0;
    for (size_t e = 0; e < layers.size(); ++e) count += entry_pages(e);
    return count;
  }
  // The largest window; 0 without any.
  int64_t window() const {
    int64_t most = 0;
    for (const KvLayer& entry : layers) most = std::max(most, entry.window);
    return most;
  }
  // Pages of an entry with that window that sequences fill at most, in steps of so many tokens.
  int64_t most_window_blocks(int64_t step_tokens, int64_t sequences) const {
    const int64_t spanned = (window() - 1 + step_tokens + page_tokens - 2) / page_tokens + 1;
    return std::min(blocks, sequences * spanned);
  }
};

struct Limits {
  int64_t context = 0;       // positions per sequence
  int64_t step_tokens = 0;   // tokens per step
  int64_t step_outputs = 0;  // logits rows per step
  int64_t sequences = 0;     // open at once
};

struct HELM_API Plan {
  static constexpr int kVersion = 14;
  static constexpr DeviceIndex kFirstAccelerator = kCpu + 1;  // if there is one
  static constexpr int64_t kUnlimited = int64_t{1} << 62;     // bytes of memory

  std::string architecture;
  std::string fingerprint;
  int64_t vocab_size = 0;
  Limits limits;
  int threads = 1;
  KvSpec kv;
  std::vector<RopeTable> rope;
  std::vector<DeviceSpec> devices = {{"cpu", DeviceKind::kCpu}};
  std::vector<TensorSpec> tensors;
  // One for each tensor and device with an op that reads it, by tensor, then device. Where an
  // accelerator has none but the CPU has, the tensor visits the accelerator in every step.
  std::vector<SliceSpec> slices;
  std::vector<ValueSpec> values;
  // The embedding first, the head last, layers ascend; of a layer the attention comes first. All
  // but the embedding may be several units, each with ops of its own.
  std::vector<UnitSpec> units;
  ValueIndex logits = 0;
  Schedule schedule;
  // Where KV of an accelerator may lie in host memory: what steps take in each mode.
  std::optional<PredictorTables> predictor;
  // By device. pages: add up to kv.pages(); those that an accelerator lacks lie in host memory.
  // memory_bytes: all that the plan may take there, or kUnlimited.
  std::vector<int64_t> pages = {0};
  std::vector<int64_t> memory_bytes = {kUnlimited};

  // Whether units lie on a device, or visit it. The CPU always takes part.
  bool uses(DeviceIndex device) const;

  // What a device holds of a tensor; null where no op there reads it.
  const SliceSpec* slice(TensorIndex tensor, DeviceIndex device) const {
    const auto before = [](const SliceSpec& a, const SliceSpec& b) {
      return a.tensor != b.tensor ? a.tensor < b.tensor : a.device < b.device;
    };
    const SliceSpec wanted{tensor, device, {}, {}};
    const auto found = std::lower_bound(slices.begin(), slices.end(), wanted, before);
    return found == slices.end() || before(wanted, *found) ? nullptr : &*found;
  }
  // The format of a tensor that an op of the unit reads.
  Format format(const UnitSpec& unit, TensorIndex tensor) const {
    const SliceSpec* held = slice(tensor, unit.device);
    if (held == nullptr) held = slice(tensor, kCpu);  // from where it visits
    return held == nullptr ? Format{} : held->format;
  }
  // Bytes that a slice has on its device.
  int64_t bytes(const SliceSpec& slice) const {
    const TensorSpec& spec = tensors[static_cast<size_t>(slice.tensor)];
    return format_bytes(slice.format, spec.rows(), spec.cols());
  }

  // What the device holds of the whole of a part that lies therein, whose rows are some of its, and
  // which takes no bytes of its own; else null.
  const SliceSpec* holder(const SliceSpec& slice) const {
    const TensorSpec& spec = tensors[static_cast<size_t>(slice.tensor)];
    if (!spec.part || spec.part->whole == kNoTensor) return nullptr;
    const SliceSpec* held = this->slice(spec.part->whole, slice.device);
    const bool rows = (!spec.is_matrix() || spec.cols() == spec.part->shape[1]) &&
                      spec.part->row % row_unit(slice.format) == 0 &&
                      slice.format.codes != Codes::kBF16C;  // its rows refer to the whole
    return rows && held != nullptr && held->format == slice.format ? held : nullptr;
  }
  // Likewise without what lies in another slice.
  int64_t own_bytes(const SliceSpec& slice) const {
    return holder(slice) != nullptr ? 0 : bytes(slice);
  }

  // What `helm-llm plan MODEL --write FILE` and, in Python, Plan.to_json() write. Throws
  // Error{kInvalid} that names the offending field, e.g. `units[3].ops[1].out`, or what was given
  // in a plan's place; from_file() also Error{kIo}.
  static Plan from_json(std::string_view json);
  static Plan from_file(const std::string& path);
};

// Calls use(value, access) for what an op does with values.
template <typename Use>
void each_value(const Plan& plan, const Op& op, const Use& use) {
  const auto width = [&](ValueIndex v) { return plan.values[static_cast<size_t>(v)].width; };
  std::visit([&](const auto& spec) { spec.values(width, use); }, op);
}

}  // namespace helm
