// The ops of a mixture of experts bound as launches.
#include "base/check.h"
#include "cuda/kernels/mixture.h"
#include "cuda/ops.h"

namespace helm::cuda {
namespace {

class BoundRoute : public BoundOp {
 public:
  BoundRoute(const RouteOp& op, const Bindings& b) : per_output_(b.per_output(op.in)) {
    if (op.chosen > kMostChosen || op.groups > kMostGroups) {
      fail(ErrorKind::kInvalid, "[cuda] a token has ", op.chosen, " experts in ", op.groups,
           " groups, at most ", kMostChosen, " in ", kMostGroups,
           " are supported; place the experts on the CPU");
    }
    args_ = {b.value(op.in),
             b.value(op.out),
             0,
             static_cast<int>(b.width(op.in)),
             static_cast<int>(op.chosen),
             b.vector(op.bias),
             op.score,
             op.normalise,
             op.scale,
             static_cast<int>(op.groups),
             static_cast<int>(op.groups_kept),
             static_cast<int>(op.group_best),
             op.near};
  }
  const char* name() const override { return "route"; }
  void launch(const StepContext& context) const override {
    RouteArgs args = args_;
    args.rows = context.rows(per_output_);
    route(args, context.queue);
  }

 private:
  bool per_output_;
  RouteArgs args_{};
};

ExpertMatrix matrix_of(TensorIndex index, const Bindings& b) {
  if (index == kNoTensor) return {};
  const Format& format = b.format(index);
  const TensorSpec& spec = b.tensor(index);
  ExpertMatrix matrix;
  matrix.cols = spec.cols();
  if (is_packed(format)) {
    matrix.is_packed = true;
    matrix.packed = {b.weight(index), format, spec.rows(), spec.cols()};
  } else {
    matrix.dense = b.weight(index);
    matrix.dtype = dtype_of(format);
  }
  return matrix;
}

class BoundExperts : public BoundOp {
 public:
  BoundExperts(const ExpertsOp& op, const Bindings& b) : per_output_(b.per_output(op.in)) {
    if (op.up != kNoTensor && b.format(op.up) != b.format(op.gate)) {
      fail(ErrorKind::kInvalid, "[cuda] gate and up of experts are held as ",
           format_name(b.format(op.gate)), " and ", format_name(b.format(op.up)),
           ", expected one format; place the experts on the CPU");
    }
    args_.in = b.value(op.in);
    args_.routes = b.value(op.routes);
    args_.act = reinterpret_cast<float*>(b.narrow);
    args_.out = b.value(op.out);
    args_.experts = static_cast<int>(op.experts);
    args_.chosen = static_cast<int>(op.chosen);
    args_.size = op.size;
    args_.out_width = b.width(op.out);
    args_.layout = op.layout;
    args_.gate = matrix_of(op.gate, b);
    args_.up = matrix_of(op.up, b);
    args_.down = matrix_of(op.down, b);
    args_.gate_bias = b.vector(op.gate_bias);
    args_.up_bias = b.vector(op.up_bias);
    args_.down_bias = b.vector(op.down_bias);
    args_.activation = op.activation;
    args_.factor = op.factor;
  }
  const char* name() const override { return "experts"; }
  void launch(const StepContext& context) const override {
    ExpertsArgs args = args_;
    args.rows = context.rows(per_output_);
    experts(args, context.queue);
  }

 private:
  bool per_output_;
  ExpertsArgs args_{};
};

}  // namespace

std::unique_ptr<BoundOp> bind_mixture(const RouteOp& op, const Bindings& bindings) {
  return std::make_unique<BoundRoute>(op, bindings);
}
std::unique_ptr<BoundOp> bind_mixture(const ExpertsOp& op, const Bindings& bindings) {
  return std::make_unique<BoundExperts>(op, bindings);
}

}  // namespace helm::cuda
