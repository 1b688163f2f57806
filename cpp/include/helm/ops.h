// The ops of a plan. Each says itself what it is, what it does with values and which tensors it
// reads; an op that lacks one of these does not compile. Header only: device plugins, which link
// nothing of this library, read it too.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "helm/mixture_ops.h"
#include "helm/op_facts.h"
#include "helm/types.h"

namespace helm {

// out(t, :) = scale * table[token(t), :]
struct EmbeddingOp {
  static constexpr OpKind kKind = OpKind::kEmbedding;
  TensorIndex table;
  ValueIndex out;
  float scale = 1;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(out, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    use(table, Reads::kRows);
  }
};

// out(t, :) += table[position(t) + offset, :]
struct PositionEmbeddingOp {
  static constexpr OpKind kKind = OpKind::kEmbedding;
  TensorIndex table;
  int64_t offset;
  ValueIndex out;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(out, Access::kUpdate);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    use(table, Reads::kRows);
  }
};

// Normalises `groups` runs of `size` elements that lie side by side:
//   out [+]= norm(in) * (weight_plus + weight) [+ bias]
struct NormOp {
  static constexpr OpKind kKind = OpKind::kNorm;
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
  float weight_plus = 0;
  bool accumulate = false;

  template <typename Width, typename Use>
  void values(const Width& width, const Use& use) const {
    use(in, Access::kRead);
    const bool whole = groups * size == width(out) && !accumulate;
    use(out, whole ? Access::kWrite : Access::kUpdate);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    use(weight, Reads::kWhole);
    if (bias != kNoTensor) use(bias, Reads::kWhole);
  }
};

// out(t, :) = [W0 in + b0 | W1 in + b1 | ...], or += with `accumulate`.
struct LinearOp {
  static constexpr OpKind kKind = OpKind::kLinear;
  struct Part {
    TensorIndex weight;  // [rows, width(in)]
    TensorIndex bias;    // [rows] or kNoTensor
  };
  ValueIndex in;
  ValueIndex out;
  std::vector<Part> parts;
  bool accumulate;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(out, accumulate ? Access::kUpdate : Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    for (const Part& part : parts) use(part.weight, Reads::kWhole);
    for (const Part& part : parts) {
      if (part.bias != kNoTensor) use(part.bias, Reads::kWhole);
    }
  }
};

// Rotary embedding in place. Pairs of each head are halves, (i, i + rotary/2), or neighbours,
// (2i, 2i + 1).
struct RopeOp {
  static constexpr OpKind kKind = OpKind::kRope;
  ValueIndex value;
  int64_t offset;
  int64_t heads;
  int64_t head_dim;
  int64_t rotary;
  int32_t table;  // index into Plan::rope
  bool neighbours = false;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(value, Access::kUpdate);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// Appends K and V of the step's tokens to the cache of `layer`, then
// out = softmax(cap(scale * q k^T), masked to 0 <= i - j and i - j < window if window > 0) v
// with cap(x) = softcap * tanh(x / softcap), or x where softcap is 0. A head with a sink has its
// exp(sink) in the softmax's sum as well.
struct AttentionOp {
  static constexpr OpKind kKind = OpKind::kAttention;
  ValueIndex in;
  int64_t q_offset, k_offset, v_offset;
  ValueIndex out;
  int64_t layer;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;
  float softcap = 0;
  TensorIndex sinks = kNoTensor;  // [heads] or kNoTensor

  int64_t partial_width() const { return heads * (head_dim + 2); }  // see below

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(out, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    if (sinks != kNoTensor) use(sinks, Reads::kWhole);
  }
};

// An attention op in pieces, for KV pages that lie in several memories; the runtime makes these,
// plans do not hold them. A partial is a value of width heads * (head_dim + 2): maxima and sums of
// all heads, then their outputs, not yet normalised (m, s, o; see FlashAttention-2, Dao 2023).

// Appends K and V of the step's tokens to the cache, those in blocks that the run's page table
// covers.
struct AppendOp {
  static constexpr OpKind kKind = OpKind::kAttention;
  ValueIndex in;
  int64_t k_offset, v_offset;
  int64_t layer;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// partial = attention to no position
struct ResetOp {
  static constexpr OpKind kKind = OpKind::kAttention;
  ValueIndex partial;
  int64_t heads, head_dim;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(partial, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// Merges into the partial the attention to those blocks of each run that its page table covers; on
// the CPU block after block, so that several such ops make the sum of one over all blocks.
struct AttendOp {
  static constexpr OpKind kKind = OpKind::kAttention;
  ValueIndex in;
  int64_t q_offset;
  ValueIndex partial;
  int64_t layer;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;
  float softcap = 0;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(partial, Access::kUpdate);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// out = both partials, merged in this order and normalised; what they held is lost.
struct MergeOp {
  static constexpr OpKind kKind = OpKind::kAttention;
  ValueIndex first, second;
  ValueIndex out;
  int64_t heads, head_dim;
  TensorIndex sinks = kNoTensor;  // [heads] or kNoTensor

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(first, Access::kRead);
    use(second, Access::kRead);
    use(out, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    if (sinks != kNoTensor) use(sinks, Reads::kWhole);
  }
};

// gated: out [+]= act(in[0:size]) * in[size:2*size]; plain: out [+]= act(in)
struct ActivationOp {
  static constexpr OpKind kKind = OpKind::kActivation;
  ActivationKind kind;
  bool gated;
  ValueIndex in;
  ValueIndex out;
  int64_t size;
  float factor = 1;  // of kScale and kSoftcap
  bool accumulate = false;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(out, accumulate ? Access::kUpdate : Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// Copies the rows whose logits were asked for.
struct SelectOp {
  static constexpr OpKind kKind = OpKind::kSelect;
  ValueIndex in;   // per token
  ValueIndex out;  // per output

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(out, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// out += in
struct AddOp {
  static constexpr OpKind kKind = OpKind::kAdd;
  ValueIndex in;
  ValueIndex out;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(out, Access::kUpdate);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

// out(t, :) = [in0(t, :) | in1(t, :) | ...]
struct ConcatOp {
  static constexpr OpKind kKind = OpKind::kConcat;
  std::vector<ValueIndex> ins;
  ValueIndex out;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    for (const ValueIndex in : ins) use(in, Access::kRead);
    use(out, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use&) const {}
};

using Op = std::variant<EmbeddingOp, PositionEmbeddingOp, NormOp, LinearOp, RopeOp, AttentionOp,
                        ActivationOp, SelectOp, AddOp, ConcatOp, RouteOp, ExpertsOp, AppendOp,
                        ResetOp, AttendOp, MergeOp>;

namespace detail {

struct AnyWidth {
  int64_t operator()(ValueIndex) const { return 0; }
};
struct AnyUse {
  void operator()(ValueIndex, Access) const {}
  void operator()(TensorIndex, Reads) const {}
};

template <typename T>
concept HasFacts = requires(const T& op) {
  OpKind{T::kKind};
  op.values(AnyWidth(), AnyUse());
  op.tensors(AnyUse());
};

template <typename Variant>
inline constexpr bool kAllHaveFacts = false;
template <typename... Ops>
inline constexpr bool kAllHaveFacts<std::variant<Ops...>> = (HasFacts<Ops> && ...);

}  // namespace detail

static_assert(detail::kAllHaveFacts<Op>, "every op says its kind, values and tensors");

inline OpKind op_kind(const Op& op) {
  return std::visit([](const auto& spec) { return spec.kKind; }, op);
}

// Calls use(tensor, reads) for the tensors that an op reads.
template <typename Use>
void each_tensor(const Op& op, const Use& use) {
  std::visit([&](const auto& spec) { spec.tensors(use); }, op);
}

}  // namespace helm
