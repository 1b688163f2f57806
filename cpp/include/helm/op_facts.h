// What every op of a plan says of itself. Header only, as helm/ops.h is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace helm {

// Indices into Plan::tensors and Plan::values; kNoTensor where an optional tensor is absent.
using TensorIndex = int32_t;
using ValueIndex = int32_t;
inline constexpr TensorIndex kNoTensor = -1;

// What an op mainly is, for those who count time.
enum class OpKind : uint8_t {
  kEmbedding,
  kNorm,
  kLinear,
  kRope,
  kAttention,
  kActivation,
  kSelect,
  kAdd,
  kConcat,
  kRoute,
  kExperts
};
inline constexpr size_t kOpKinds = 11;
constexpr const char* op_kind_name(OpKind kind) {
  constexpr std::array<const char*, kOpKinds> kNames = {"embedding", "norm",       "linear", "rope",
                                                        "attention", "activation", "select", "add",
                                                        "concat",    "route",      "experts"};
  return kNames[static_cast<size_t>(kind)];
}

// What an op does with a value. Updated ones keep a part of what they held, or add to it.
enum class Access : uint8_t { kRead, kWrite, kUpdate };
// What an op reads of a tensor in a step: a row for each token, or all.
enum class Reads : uint8_t { kRows, kWhole };

// Every op has
//   kKind                what it is,
//   values(width, use)   calls use(value, access); width(value) gives elements per row,
//   tensors(use)         calls use(tensor, reads), in the order in which a step reads them.

}  // namespace helm
