#include <array>
#include <type_traits>
#include <variant>

#include "helm/plan.h"

namespace helm {

OpKind op_kind(const Op& op) {
  return std::visit(
      [](const auto& spec) {
        using Type = std::decay_t<decltype(spec)>;
        if constexpr (std::is_same_v<Type, EmbeddingOp> ||
                      std::is_same_v<Type, PositionEmbeddingOp>) {
          return OpKind::kEmbedding;
        } else if constexpr (std::is_same_v<Type, NormOp>) {
          return OpKind::kNorm;
        } else if constexpr (std::is_same_v<Type, LinearOp>) {
          return OpKind::kLinear;
        } else if constexpr (std::is_same_v<Type, RopeOp>) {
          return OpKind::kRope;
        } else if constexpr (std::is_same_v<Type, ActivationOp>) {
          return OpKind::kActivation;
        } else if constexpr (std::is_same_v<Type, SelectOp>) {
          return OpKind::kSelect;
        } else {
          return OpKind::kAttention;
        }
      },
      op);
}

const char* op_kind_name(OpKind kind) {
  static constexpr std::array<const char*, kOpKinds> kNames = {
      "embedding", "norm", "linear", "rope", "attention", "activation", "select"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace helm
