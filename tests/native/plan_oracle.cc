#include "plan_oracle.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "oracle.h"

namespace helm::test {
namespace {

double activate(const ActivationOp& op, double x) {
  switch (op.kind) {
    case ActivationKind::kScale:
      return op.factor * x;
    case ActivationKind::kSoftcap:
      return op.factor * std::tanh(x / op.factor);
    case ActivationKind::kSilu:
      return x / (1 + std::exp(-x));
    case ActivationKind::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case ActivationKind::kGeluTanh:
      return 0.5 * x *
             (1 + std::tanh(std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case ActivationKind::kRelu:
      return std::max(x, 0.0);
    case ActivationKind::kSwigluLimit:
      break;  // see gated()
  }
  return x;
}

double gated(ActivationKind kind, float factor, double gate, double up) {
  if (kind != ActivationKind::kSwigluLimit) {
    ActivationOp op{};
    op.kind = kind, op.factor = factor;
    return activate(op, gate) * up;
  }
  const double limit = factor, low = std::min(gate, limit);
  return low / (1 + std::exp(-1.702 * low)) * (std::clamp(up, -limit, limit) + 1);
}

double round_to(DType dtype, double x) {
  const auto f = static_cast<float>(x);
  switch (dtype) {
    case DType::kF16:
      return decode_f16(encode_f16(f));
    case DType::kBF16:
      return decode_bf16(encode_bf16(f));
    case DType::kF32:
    case DType::kI8:
      break;
  }
  return f;
}

// K or V of all heads as the cache keeps them.
void round_kv(const KvSpec& kv, Row* row) {
  if (kv.dtype != DType::kI8) {
    for (double& x : *row) x = round_to(kv.dtype, x);
    return;
  }
  for (auto head = row->begin(); head != row->end(); head += kv.head_dim) {
    const Quantized kept = quantized(std::vector<float>(head, head + kv.head_dim));
    for (int64_t d = 0; d < kv.head_dim; ++d) {
      head[d] = static_cast<double>(kept.scale) * kept.q[static_cast<size_t>(d)];
    }
  }
}

}  // namespace

Row PlanOracle::next(int sequence, int32_t token) {
  sequence_ = sequence;
  token_ = token;
  position_ = lengths_[sequence]++;
  values_.clear();
  for (const ValueSpec& spec : plan_.values) values_.emplace_back(spec.width, 0.0);
  for (const UnitSpec& unit : plan_.units) {
    for (const Op& op : unit.ops) std::visit([this](const auto& spec) { run(spec); }, op);
  }
  return value(plan_.logits);
}

void PlanOracle::run(const EmbeddingOp& op) {
  for (int64_t i = 0; i < width(op.out); ++i) {
    value(op.out)[static_cast<size_t>(i)] = op.scale * weight(op.table, token_ * width(op.out) + i);
  }
}

void PlanOracle::run(const PositionEmbeddingOp& op) {
  for (int64_t i = 0; i < width(op.out); ++i) {
    value(op.out)[static_cast<size_t>(i)] +=
        weight(op.table, (position_ + op.offset) * width(op.out) + i);
  }
}

void PlanOracle::run(const NormOp& op) {
  const Row in = value(op.in);
  for (int64_t group = 0; group < op.groups; ++group) {
    const double* x = in.data() + op.in_offset + group * op.size;
    double* y = value(op.out).data() + op.out_offset + group * op.size;
    const auto n = static_cast<double>(op.size);
    double mean = 0;
    for (int64_t i = 0; op.layer_norm && i < op.size; ++i) mean += x[i] / n;
    double square = 0;
    for (int64_t i = 0; i < op.size; ++i) square += (x[i] - mean) * (x[i] - mean) / n;
    for (int64_t i = 0; i < op.size; ++i) {
      const double held = op.accumulate ? y[i] : 0;
      y[i] = held +
             (x[i] - mean) / std::sqrt(square + op.eps) * (op.weight_plus + weight(op.weight, i));
      if (op.bias != kNoTensor) y[i] += weight(op.bias, i);
    }
  }
}

void PlanOracle::run(const LinearOp& op) {
  const Row& in = value(op.in);
  size_t column = 0;
  for (const LinearOp::Part& part : op.parts) {
    const int64_t rows = plan_.tensors[static_cast<size_t>(part.weight)].shape[0];
    for (int64_t r = 0; r < rows; ++r, ++column) {
      double sum = op.accumulate ? value(op.out)[column] : 0;
      if (part.bias != kNoTensor) sum += weight(part.bias, r);
      for (size_t k = 0; k < in.size(); ++k) {
        sum += in[k] * weight(part.weight, r * width(op.in) + static_cast<int64_t>(k));
      }
      value(op.out)[column] = sum;
    }
  }
}

void PlanOracle::run(const RopeOp& op) {
  const RopeTable& table = plan_.rope[static_cast<size_t>(op.table)];
  const int64_t half = op.rotary / 2;
  for (int64_t head = 0; head < op.heads; ++head) {
    double* x = value(op.value).data() + op.offset + head * op.head_dim;
    for (int64_t i = 0; i < half; ++i) {
      // The angle is rounded to f32, as the contract says.
      const double angle = static_cast<float>(position_) * table.inv_freq[static_cast<size_t>(i)];
      const double c = std::cos(angle) * table.attention_factor;
      const double s = std::sin(angle) * table.attention_factor;
      double& first = x[op.neighbours ? 2 * i : i];
      double& second = x[op.neighbours ? 2 * i + 1 : i + half];
      const double a = first;
      const double b = second;
      first = a * c - b * s;
      second = b * c + a * s;
    }
  }
}

void PlanOracle::run(const AttentionOp& op) {
  const Row& in = value(op.in);
  const auto kept = [&](int64_t offset) {
    Row row(in.begin() + offset, in.begin() + offset + op.kv_heads * op.head_dim);
    round_kv(plan_.kv, &row);
    return row;
  };
  std::vector<Row>& keys = keys_[{sequence_, op.layer}];
  std::vector<Row>& values = kept_values_[{sequence_, op.layer}];
  keys.push_back(kept(op.k_offset));
  values.push_back(kept(op.v_offset));
  const int64_t first = op.window > 0 ? std::max<int64_t>(0, position_ - op.window + 1) : 0;
  for (int64_t head = 0; head < op.heads; ++head) {
    const int64_t kv = head / (op.heads / op.kv_heads) * op.head_dim;
    const double* q = in.data() + op.q_offset + head * op.head_dim;
    Row score;
    for (int64_t j = first; j <= position_; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < op.head_dim; ++d) {
        dot += q[d] * keys[static_cast<size_t>(j)][static_cast<size_t>(kv + d)];
      }
      const double scaled = dot * op.scale;
      score.push_back(op.softcap > 0 ? op.softcap * std::tanh(scaled / op.softcap) : scaled);
    }
    const double most = *std::max_element(score.begin(), score.end());
    double total = 0;
    for (double& s : score) total += s = std::exp(s - most);
    if (op.sinks != kNoTensor) total += std::exp(weight(op.sinks, head) - most);
    for (int64_t d = 0; d < op.head_dim; ++d) {
      double sum = 0;
      for (int64_t j = first; j <= position_; ++j) {
        sum += score[static_cast<size_t>(j - first)] / total *
               values[static_cast<size_t>(j)][static_cast<size_t>(kv + d)];
      }
      value(op.out)[static_cast<size_t>(head * op.head_dim + d)] = sum;
    }
  }
}

void PlanOracle::run(const ActivationOp& op) {
  const Row in = value(op.in);
  for (size_t i = 0; i < static_cast<size_t>(op.size); ++i) {
    const double held = op.accumulate ? value(op.out)[i] : 0;
    const double up = op.gated ? in[i + static_cast<size_t>(op.size)] : 1;
    value(op.out)[i] = held + gated(op.kind, op.factor, in[i], up);
  }
}

void PlanOracle::run(const SelectOp& op) {
  value(op.out) = value(op.in);
}

void PlanOracle::run(const AddOp& op) {
  for (size_t i = 0; i < value(op.in).size(); ++i) value(op.out)[i] += value(op.in)[i];
}

void PlanOracle::run(const ConcatOp& op) {
  Row all;
  for (const ValueIndex in : op.ins) all.insert(all.end(), value(in).begin(), value(in).end());
  value(op.out) = all;
}

void PlanOracle::run(const RouteOp& op) {
  const Row& in = value(op.in);
  const auto count = static_cast<int64_t>(in.size());
  Row scores = in, choice;
  const double most = *std::max_element(in.begin(), in.end());
  double total = 0;
  for (const double x : in) total += std::exp(x - most);
  for (double& s : scores) {
    if (op.score == RouteScore::kSoftmax) s = std::exp(s - most) / total;
    if (op.score == RouteScore::kSigmoid) s = 1 / (1 + std::exp(-s));
  }
  choice = scores;
  for (int64_t e = 0; op.bias != kNoTensor && e < count; ++e) {
    choice[static_cast<size_t>(e)] += weight(op.bias, e);
  }
  std::vector<std::pair<double, int64_t>> order;  // the least first
  for (int64_t e = 0; e < count; ++e) order.emplace_back(-choice[static_cast<size_t>(e)], e);
  std::sort(order.begin(), order.end());
  order.resize(static_cast<size_t>(op.chosen));
  std::sort(order.begin(), order.end(), [](auto a, auto b) { return a.second < b.second; });
  double best = -1e300, sum = 0;
  for (const auto& [negative, e] : order) best = std::max(best, scores[static_cast<size_t>(e)]);
  Row weights;
  for (const auto& [negative, e] : order) {
    const double s = scores[static_cast<size_t>(e)];
    weights.push_back(op.score == RouteScore::kSoftmaxSelected ? std::exp(s - best) : s);
    sum += weights.back();
  }
  const bool divides = op.normalise || op.score == RouteScore::kSoftmaxSelected;
  for (size_t i = 0; i < weights.size(); ++i) {
    value(op.out)[i] = static_cast<double>(order[i].second);
    value(op.out)[weights.size() + i] = weights[i] * op.scale / (divides ? sum : 1);
  }
}

void PlanOracle::run(const ExpertsOp& op) {
  const Row &in = value(op.in), &routes = value(op.routes);
  const auto k = static_cast<size_t>(op.chosen);
  const auto row = [&](TensorIndex matrix, TensorIndex bias, int64_t r, const Row& x) {
    double sum = bias == kNoTensor ? 0 : weight(bias, r);
    const auto cols = static_cast<int64_t>(x.size());
    for (int64_t c = 0; c < cols; ++c) {
      sum += weight(matrix, r * cols + c) * x[static_cast<size_t>(c)];
    }
    return sum;
  };
  for (size_t i = 0; i < k; ++i) {
    const auto e = static_cast<int64_t>(routes[i]);
    Row act;
    for (int64_t r = 0; r < op.size; ++r) {
      const int64_t two = 2 * e * op.size;
      double gate = 0, up = 0;
      if (op.layout == GateUp::kApart) {
        gate = row(op.gate, op.gate_bias, e * op.size + r, in);
        up = row(op.up, op.up_bias, e * op.size + r, in);
      } else if (op.layout == GateUp::kHalves) {
        gate = row(op.gate, op.gate_bias, two + r, in);
        up = row(op.gate, op.gate_bias, two + op.size + r, in);
      } else {
        gate = row(op.gate, op.gate_bias, two + 2 * r, in);
        up = row(op.gate, op.gate_bias, two + 2 * r + 1, in);
      }
      act.push_back(gated(op.activation, op.factor, gate, up));
    }
    for (int64_t r = 0; r < width(op.out); ++r) {
      value(op.out)[static_cast<size_t>(r)] +=
          routes[k + i] * row(op.down, op.down_bias, e * width(op.out) + r, act);
    }
  }
}

}  // namespace helm::test
