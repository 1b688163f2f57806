// The ops of a mixture of experts: which experts a token goes to, and what they make of it. Header
// only, as helm/ops.h is, which has the others.
#pragma once

#include <cmath>
#include <cstdint>

#include "helm/op_facts.h"

namespace helm {

// kScale: factor * x; kSoftcap: factor * tanh(x / factor). kSwigluLimit, gated alone:
// act(g) * (clamp(u, -factor, factor) + 1), act(g) = h / (1 + exp(-1.702 h)), h = min(g, factor)
enum class ActivationKind : uint8_t {
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kScale,
  kSoftcap,
  kSwigluLimit
};

// What a router's logits become: over all experts, or over those that are chosen. kSparsemixer:
// of each of two choices the softmax over experts whose logits are near its own.
enum class RouteScore : uint8_t { kSoftmax, kSoftmaxSelected, kSigmoid, kSparsemixer };

// out(t, :) = [ids | weights]: the `chosen` experts of a token, ascending, then their weights.
//   s = score(in(t, :)), c = s + bias; of c the greatest are chosen, of equal ones the lower id,
//   of the `groups_kept` groups of neighbours alone where the sum of the `group_best` greatest c is
//   greatest; weights = scale * s, over their sum first where `normalise`.
// In logits with a NaN, or infinite ones at the top, the first experts are chosen and weights NaN.
struct RouteOp {
  static constexpr OpKind kKind = OpKind::kRoute;
  ValueIndex in;   // [rows, experts]
  ValueIndex out;  // [rows, 2 * chosen]
  int64_t chosen;
  RouteScore score;
  bool normalise = false;
  float scale = 1;
  TensorIndex bias = kNoTensor;  // [experts] or kNoTensor
  int64_t groups = 1, groups_kept = 1;
  int64_t group_best = 1;
  float near = 0;  // of kSparsemixer: the share of the greatest that one may be below it

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(out, Access::kWrite);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    if (bias != kNoTensor) use(bias, Reads::kWhole);
  }
};

// How the rows of gate and up lie: in two matrices; or in one, of each expert first those of gate,
// or both in turn.
enum class GateUp : uint8_t { kApart, kHalves, kNeighbours };

// out(t, :) += sum over a token's experts e, ascending, of
//   weight(t, e) * (Down_e act(Gate_e in(t) + b, Up_e in(t) + b) + b)
// Matrices and biases of all experts are stacked: expert e has the e-th `size` rows of gate and of
// up, and the e-th width(out) rows of down.
struct ExpertsOp {
  static constexpr OpKind kKind = OpKind::kExperts;
  ValueIndex in;
  ValueIndex routes;  // [rows, 2 * chosen], as RouteOp writes them
  ValueIndex out;
  int64_t experts;
  int64_t chosen;
  int64_t size;
  GateUp layout;
  TensorIndex gate;                   // [experts * size, width(in)], or twice as many rows
  TensorIndex up;                     // [experts * size, width(in)], or kNoTensor
  TensorIndex down;                   // [experts * width(out), size]
  TensorIndex gate_bias = kNoTensor;  // as many as the matrix has rows, or kNoTensor
  TensorIndex up_bias = kNoTensor;
  TensorIndex down_bias = kNoTensor;
  ActivationKind activation = ActivationKind::kSilu;
  float factor = 1;

  template <typename Width, typename Use>
  void values(const Width&, const Use& use) const {
    use(in, Access::kRead);
    use(routes, Access::kRead);
    use(out, Access::kUpdate);
  }
  template <typename Use>
  void tensors(const Use& use) const {
    for (const TensorIndex t : {gate, up, down, gate_bias, up_bias, down_bias}) {
      if (t != kNoTensor) use(t, Reads::kWhole);
    }
  }

  // How many different experts so many tokens have, each chosen as often as any other; a step reads
  // the matrices of these alone.
  double expected(int64_t rows) const {
    const double all = static_cast<double>(experts);
    const double others = 1 - static_cast<double>(chosen) / all;
    return all * (1 - std::pow(others, static_cast<double>(rows)));
  }
};

}  // namespace helm
