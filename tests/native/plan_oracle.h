// The meaning of a plan's ops in double precision, with plain loops over one row at a time. Shares
// nothing with the devices but the plan; K and V are kept per sequence, without pages.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "helm/plan.h"

namespace helm::test {

using Row = std::vector<double>;

class PlanOracle {
 public:
  // `weights` by TensorIndex, as the device holds them (rounded to their dtype).
  PlanOracle(const Plan& plan, std::vector<std::vector<float>> weights)
      : plan_(plan), weights_(std::move(weights)) {}

  // Runs all units for the next token of a sequence; returns its logits row.
  Row next(int sequence, int32_t token);

 private:
  void run(const EmbeddingOp& op);
  void run(const PositionEmbeddingOp& op);
  void run(const NormOp& op);
  void run(const LinearOp& op);
  void run(const RopeOp& op);
  void run(const AttentionOp& op);
  void run(const ActivationOp& op);
  void run(const SelectOp& op);
  void run(const AddOp& op);
  void run(const ConcatOp& op);
  void run(const RouteOp& op);
  void run(const ExpertsOp& op);
  template <class Internal>
  void run(const Internal&) {
    throw std::logic_error("plans do not hold this op");
  }

  double weight(TensorIndex tensor, int64_t i) const {
    return weights_[static_cast<size_t>(tensor)][static_cast<size_t>(i)];
  }
  Row& value(ValueIndex index) { return values_[static_cast<size_t>(index)]; }
  int64_t width(ValueIndex index) const { return plan_.values[static_cast<size_t>(index)].width; }

  const Plan& plan_;
  std::vector<std::vector<float>> weights_;
  std::map<int, int64_t> lengths_;                                          // by sequence
  std::map<std::pair<int, int64_t>, std::vector<Row>> keys_, kept_values_;  // by (sequence, layer)

  std::vector<Row> values_;  // of the current row, by ValueIndex
  int sequence_ = 0;
  int64_t position_ = 0;
  int32_t token_ = 0;
};

}  // namespace helm::test
