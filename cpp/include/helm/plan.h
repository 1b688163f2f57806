// The execution plan: what the native runtime is told to run, and where. Parsed from JSON that is
// checked as hostile input; once a Plan exists, every index in it is valid and every shape agrees.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "helm/ops.h"
#include "helm/types.h"

namespace helm {

// Where a tensor's bytes lie in the model directory.
struct TensorSource {
  std::string file;    // relative to the model directory
  int64_t offset = 0;  // bytes from the start of the file
  DType dtype = DType::kF32;
};

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;          // [rows, cols] or [size]
  DType dtype = DType::kF32;           // as placed; vectors are always f32
  std::optional<TensorSource> source;  // absent: bound from memory

  HELM_API int64_t elements() const;
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }
};

// An activation buffer, [tokens, width] or [outputs, width], f32.
struct ValueSpec {
  std::string name;
  int64_t width = 0;
  bool per_output = false;  // one row per requested logits row instead of one per token
};

// The smallest thing that is placed: the embedding, one block, or the output head.
struct UnitSpec {
  std::string name;
  std::string device;  // "cpu" or "accelerator"
  std::vector<Op> ops;
};

struct RopeTable {
  std::vector<float> inv_freq;  // [rotary / 2], radians per position
  float attention_factor = 1;   // multiplies cos and sin
};

struct KvSpec {
  DType dtype = DType::kF32;
  int64_t page_tokens = 0;
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t pages = 0;  // one page: K and V of page_tokens positions of one layer of one sequence

  // A page is 2 * kv_heads slabs, K then V of one head each: its rows and, if the dtype has
  // scales, theirs, aligned.
  int64_t row_bytes() const { return head_dim * dtype_bytes(dtype); }
  int64_t rows_bytes() const {
    const int64_t bytes = page_tokens * row_bytes();
    return kv_scale_bytes(dtype) > 0 ? (bytes + 3) / 4 * 4 : bytes;
  }
  int64_t slab_bytes() const { return rows_bytes() + page_tokens * kv_scale_bytes(dtype); }
  int64_t page_bytes() const { return 2 * kv_heads * slab_bytes(); }
};

// How the stages of several devices run together.
struct Schedule {
  bool prefill_overlap =
      false;                  // the CPU works on a step while the accelerator is at the one before
  int64_t decode_groups = 1;  // decoding sequences take turns in so many groups, likewise
  // Steps of at least so many tokens (0: none) run the blocks that lie in host memory on the
  // accelerator: their weights visit it one block after the other, and their KV with them, in so
  // many pages there.
  int64_t stream_tokens = 0;
  int64_t stream_pages = 0;
  // KV blocks of accelerator layers beyond what fits there lie in host memory, the oldest first,
  // once more than this share of the slots there is in use. In decode their pages visit the
  // accelerator or the CPU attends to them; in prefill they visit.
  enum class Overflow : uint8_t { kStream, kCpu };
  Overflow overflow = Overflow::kStream;
  double watermark = 0.8;
};

// How tensors in files come into host memory. Copied: into one arena on huge pages. Mapped: used
// from the page cache where no conversion is needed; starts at once, shared by processes, some
// percent slower to read because its pages are small. Compressed: copied, bf16 matrices on the CPU
// in 12 bits per weight, exactly; logits have the same bits, decode reads a quarter less.
enum class WeightLoading : uint8_t { kCopied, kMapped, kCompressed };

struct Limits {
  int64_t context = 0;       // positions per sequence
  int64_t step_tokens = 0;   // tokens per step
  int64_t step_outputs = 0;  // logits rows per step
  int64_t sequences = 0;     // open at once
};

struct HELM_API Plan {
  static constexpr int kVersion = 5;

  std::string architecture;
  std::string fingerprint;
  int64_t vocab_size = 0;
  Limits limits;
  int threads = 1;
  KvSpec kv;
  std::vector<RopeTable> rope;
  std::vector<TensorSpec> tensors;
  std::vector<ValueSpec> values;
  std::vector<UnitSpec> units;
  ValueIndex logits = 0;
  Schedule schedule;
  WeightLoading loading = WeightLoading::kCopied;
  int64_t accelerator_pages = 0;         // of kv.pages; the others lie in host memory
  int64_t accelerator_memory_bytes = 0;  // all that the plan may take there

  bool uses_accelerator() const;

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
