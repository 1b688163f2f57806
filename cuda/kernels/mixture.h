// The contract of a mixture's kernels. Knows nothing of plans.
#pragma once

#include "helm/mixture_ops.h"
#include "packed.h"

namespace helm::cuda {

inline constexpr int kMostChosen = 64;  // experts of a token
inline constexpr int kMostGroups = 64;

// Rows of helm::RouteOp's result.
struct RouteArgs {
  const float* in;  // [rows, experts]
  float* out;       // [rows, 2 * chosen]
  int64_t rows;
  int experts;
  int chosen;         // at most kMostChosen
  const float* bias;  // [experts] or null
  RouteScore score;
  bool normalise;
  float scale;
  int groups, groups_kept, group_best;  // at most kMostGroups
  float near;
};
void route(const RouteArgs& args, const Queue& queue);

// Experts' rows of a matrix: packed, or dense, [rows, cols] of `dtype`.
struct ExpertMatrix {
  bool is_packed = false;
  PackedMatrix packed;
  const void* dense = nullptr;
  DType dtype = DType::kF32;
  int64_t cols = 0;
};

// What helm::ExpertsOp says, in two launches: act of every (row, expert), then the sum. Sums are of
// f32 activations, one row of weights after the other, for any number of rows.
struct ExpertsArgs {
  const float* in;      // [rows, gate.cols]
  const float* routes;  // [rows, 2 * chosen]
  float* act;           // [rows * chosen, size]
  float* out;           // [rows, out_width]
  int64_t rows;
  int experts, chosen;
  int64_t size, out_width;
  GateUp layout;
  ExpertMatrix gate, up, down;
  const float *gate_bias, *up_bias, *down_bias;  // or null
  ActivationKind activation;
  float factor;
};
void experts(const ExpertsArgs& args, const Queue& queue);

}  // namespace helm::cuda
