// The execution plan: what the native runtime is told to run, and where. Parsed from JSON that is
// checked as hostile input; once a Plan exists, every index in it is valid and every shape agrees.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "helm/types.h"

namespace helm {

// Indices into Plan::tensors and Plan::values; kNoTensor where an optional tensor is absent.
using TensorIndex = int32_t;
using ValueIndex = int32_t;
inline constexpr TensorIndex kNoTensor = -1;

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

  int64_t elements() const;
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }
};

// An activation buffer, [tokens, width] or [outputs, width], f32.
struct ValueSpec {
  std::string name;
  int64_t width = 0;
  bool per_output = false;  // one row per requested logits row instead of one per token
};

// out(t, :) = table[token(t), :]
struct EmbeddingOp {
  TensorIndex table;
  ValueIndex out;
};

// out(t, :) += table[position(t) + offset, :]
struct PositionEmbeddingOp {
  TensorIndex table;
  int64_t offset;
  ValueIndex out;
};

// Normalises `groups` runs of `size` elements that lie side by side.
struct NormOp {
  bool layer_norm;  // else rms
  ValueIndex in;
  int64_t in_offset;
  ValueIndex out;
  int64_t out_offset;
  int64_t groups;
  int64_t size;
  TensorIndex weight;  // [size]
  TensorIndex bias;    // [size] or kNoTensor
  float eps;
};

// out(t, :) = [W0 in + b0 | W1 in + b1 | ...], or += with `accumulate`.
struct LinearOp {
  struct Part {
    TensorIndex weight;  // [rows, width(in)]
    TensorIndex bias;    // [rows] or kNoTensor
  };
  ValueIndex in;
  ValueIndex out;
  std::vector<Part> parts;
  bool accumulate;
};

// Rotary embedding in place, halves paired: (i, i + rotary/2) of each head.
struct RopeOp {
  ValueIndex value;
  int64_t offset;
  int64_t heads;
  int64_t head_dim;
  int64_t rotary;
  int32_t table;  // index into Plan::rope
};

// Appends K and V of the step's tokens to the cache of `layer`, then
// out = softmax(scale * q k^T, masked to 0 <= i - j and i - j < window if window > 0) v
struct AttentionOp {
  ValueIndex in;
  int64_t q_offset, k_offset, v_offset;
  ValueIndex out;
  int64_t layer;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;
};

// An attention op in pieces, for KV pages that lie in several memories; the runtime makes these,
// plans do not hold them. A partial is a value of width heads * (head_dim + 2): maxima and sums of
// all heads, then their outputs, not yet normalised (m, s, o; see FlashAttention-2, Dao 2023).

// Appends K and V of the step's tokens to the cache.
struct AppendOp {
  ValueIndex in;
  int64_t k_offset, v_offset;
  int64_t layer;
};

// partial = attention to no position
struct ResetOp {
  ValueIndex partial;
  int64_t heads, head_dim;
};

// Merges into the partial the attention to those blocks of each run that its page table covers.
struct AttendOp {
  ValueIndex in;
  int64_t q_offset;
  ValueIndex partial;
  int64_t layer;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;
};

// out = both partials, merged in this order and normalised; what they held is lost.
struct MergeOp {
  ValueIndex first, second;
  ValueIndex out;
  int64_t heads, head_dim;
};

enum class ActivationKind : uint8_t { kSilu, kGelu, kGeluTanh, kRelu };

// gated: out = act(in[0:size]) * in[size:2*size]; plain: out = act(in)
struct ActivationOp {
  ActivationKind kind;
  bool gated;
  ValueIndex in;
  ValueIndex out;
  int64_t size;
};

// Copies the rows whose logits were asked for.
struct SelectOp {
  ValueIndex in;   // per token
  ValueIndex out;  // per output
};

using Op = std::variant<EmbeddingOp, PositionEmbeddingOp, NormOp, LinearOp, RopeOp, AttentionOp,
                        ActivationOp, SelectOp, AppendOp, ResetOp, AttendOp, MergeOp>;

// What an op mainly is, for those who count time.
enum class OpKind : uint8_t { kEmbedding, kNorm, kLinear, kRope, kAttention, kActivation, kSelect };
inline constexpr size_t kOpKinds = 7;
HELM_API OpKind op_kind(const Op& op);
HELM_API const char* op_kind_name(OpKind kind);  // "embedding", "norm", "linear", ...

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

  // Throws Error{kInvalid} that names the offending field, e.g. `units[3].ops[1].out`.
  static Plan from_json(std::string_view json);
};

}  // namespace helm
