#include "cuda/ops.h"

#include <type_traits>
#include <utility>
#include <variant>

#include "cuda/kernels/packed.h"
#include "cuda/narrowing.h"

namespace helm::cuda {
namespace {

class BoundEmbedding : public BoundOp {
 public:
  BoundEmbedding(const EmbeddingOp& op, const Bindings& b)
      : table_(b.weight(op.table)),
        format_(b.format(op.table)),
        rows_(b.tensor(op.table).rows()),
        out_(b.value(op.out)),
        width_(b.width(op.out)),
        scale_(op.scale) {}
  const char* name() const override { return "embedding"; }
  void launch(const StepContext& context) const override {
    const int64_t tokens = context.shape.tokens;
    if (is_packed(format_)) {
      packed_embedding({table_, format_, rows_, width_}, scale_, out_, tokens, context.tables,
                       context.queue);
    } else {
      embedding({table_, dtype_of(format_), out_, width_, tokens, scale_}, context.tables,
                context.queue);
    }
  }

 private:
  const void* table_;  // [rows, width]
  Format format_;
  int64_t rows_;
  float* out_;  // [tokens, width]
  int64_t width_;
  float scale_;
};

class BoundPositionEmbedding : public BoundOp {
 public:
  BoundPositionEmbedding(const PositionEmbeddingOp& op, const Bindings& b)
      : table_(b.weight(op.table)),
        format_(b.format(op.table)),
        rows_(b.tensor(op.table).rows()),
        offset_(op.offset),
        out_(b.value(op.out)),
        width_(b.width(op.out)) {}
  const char* name() const override { return "position_embedding"; }
  void launch(const StepContext& context) const override {
    const int64_t tokens = context.shape.tokens;
    if (is_packed(format_)) {
      packed_position_embedding({table_, format_, rows_, width_}, offset_, out_, tokens,
                                context.tables, context.queue);
    } else {
      position_embedding({table_, dtype_of(format_), offset_, out_, width_, tokens}, context.tables,
                         context.queue);
    }
  }

 private:
  const void* table_;  // [rows, width]
  Format format_;
  int64_t rows_;
  int64_t offset_;
  float* out_;  // [tokens, width]
  int64_t width_;
};

// Narrows the result for the product that comes next where it has many rows.
class NarrowingOp : public BoundOp {
 protected:
  NarrowingOp(const Narrowing& narrowing, const Bindings& b)
      : copy_{b.narrow, narrowing.dtype}, alone_(narrowing.alone) {}

  template <class Args>
  void narrow_many(Args* args) const {
    if (copy_.dtype == DType::kF32 || args->rows <= kMatvecTokens) return;
    args->copy = copy_;
    if (alone_) args->y = nullptr;
  }

 private:
  NarrowCopy copy_;
  bool alone_;
};

class BoundNorm : public NarrowingOp {
 public:
  BoundNorm(const NormOp& op, const Bindings& b, const Narrowing& narrowing)
      : NarrowingOp(narrowing, b), per_output_(b.per_output(op.in)) {
    args_.layer_norm = op.layer_norm;
    args_.x = b.value(op.in) + op.in_offset;
    args_.x_stride = b.width(op.in);
    args_.y = b.value(op.out) + op.out_offset;
    args_.y_stride = b.width(op.out);
    args_.groups = op.groups;
    args_.n = op.size;
    args_.weight = b.vector(op.weight);
    args_.bias = b.vector(op.bias);
    args_.eps = op.eps;
    args_.weight_plus = op.weight_plus;
    args_.accumulate = op.accumulate;
  }
  const char* name() const override { return "norm"; }
  void launch(const StepContext& context) const override {
    NormArgs args = args_;
    args.rows = context.rows(per_output_);
    narrow_many(&args);
    if (args.rows > 0) norm(args, context.queue);
  }

 private:
  NormArgs args_{};
  bool per_output_;
};

class BoundRope : public BoundOp {
 public:
  BoundRope(const RopeOp& op, const Bindings& b) : args_(bind_rope(op, b)) {}
  const char* name() const override { return "rope"; }
  void launch(const StepContext& context) const override {
    RopeArgs args = args_;
    args.tokens = context.shape.tokens;
    rope(args, context.tables, context.queue);
  }

 private:
  RopeArgs args_;
};

class BoundActivation : public NarrowingOp {
 public:
  BoundActivation(const ActivationOp& op, const Bindings& b, const Narrowing& narrowing)
      : NarrowingOp(narrowing, b), per_output_(b.per_output(op.in)) {
    args_.kind = op.kind;
    args_.gated = op.gated;
    args_.x = b.value(op.in);
    args_.x_stride = b.width(op.in);
    args_.y = b.value(op.out);
    args_.y_stride = b.width(op.out);
    args_.n = op.size;
    args_.factor = op.factor;
    args_.accumulate = op.accumulate;
  }
  const char* name() const override { return "activation"; }
  void launch(const StepContext& context) const override {
    ActivationArgs args = args_;
    args.rows = context.rows(per_output_);
    narrow_many(&args);
    if (args.rows > 0) activation(args, context.queue);
  }

 private:
  ActivationArgs args_{};
  bool per_output_;
};

class BoundSelect : public BoundOp {
 public:
  BoundSelect(const SelectOp& op, const Bindings& b)
      : in_(b.value(op.in)), out_(b.value(op.out)), width_(b.width(op.in)) {}
  const char* name() const override { return "select"; }
  void launch(const StepContext& context) const override {
    if (context.shape.outputs == 0) return;
    select(in_, out_, width_, context.shape.outputs, context.tables, context.queue);
  }

 private:
  const float* in_;  // [tokens, width]
  float* out_;       // [outputs, width]
  int64_t width_;
};

class BoundAdd : public BoundOp {
 public:
  BoundAdd(const AddOp& op, const Bindings& b)
      : per_output_(b.per_output(op.out)),
        in_(b.value(op.in)),
        out_(b.value(op.out)),
        width_(b.width(op.out)) {}
  const char* name() const override { return "add"; }
  void launch(const StepContext& context) const override {
    add(in_, width_, context.rows(per_output_), width_, out_, width_, context.queue);
  }

 private:
  bool per_output_;
  const float* in_;  // [rows, width]
  float* out_;       // [rows, width]
  int64_t width_;
};

class BoundConcat : public BoundOp {
 public:
  BoundConcat(const ConcatOp& op, const Bindings& b)
      : per_output_(b.per_output(op.out)), out_(b.value(op.out)), width_(b.width(op.out)) {
    for (const ValueIndex in : op.ins) ins_.push_back({b.value(in), b.width(in)});
  }
  const char* name() const override { return "concat"; }
  void launch(const StepContext& context) const override {
    float* out = out_;
    for (const auto& [in, width] : ins_) {
      copy_columns(in, width, context.rows(per_output_), width, out, width_, context.queue);
      out += width;
    }
  }

 private:
  bool per_output_;
  std::vector<std::pair<const float*, int64_t>> ins_;  // [rows, width] each
  float* out_;                                         // [rows, width]
  int64_t width_;
};

// narrowed: what the op before has narrowed its result to. narrowing: what this one is to narrow.
std::unique_ptr<BoundOp> bind_op(const Op& op, const RopeOp* rope, DType narrowed,
                                 const Narrowing& narrowing, const Bindings& bindings) {
  return std::visit(
      [&](const auto& spec) -> std::unique_ptr<BoundOp> {
        using Type = std::decay_t<decltype(spec)>;
        if constexpr (std::is_same_v<Type, EmbeddingOp>) {
          return std::make_unique<BoundEmbedding>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, PositionEmbeddingOp>) {
          return std::make_unique<BoundPositionEmbedding>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, NormOp>) {
          return std::make_unique<BoundNorm>(spec, bindings, narrowing);
        } else if constexpr (std::is_same_v<Type, LinearOp>) {
          return bind_linear(spec, narrowed, bindings);
        } else if constexpr (std::is_same_v<Type, RopeOp>) {
          return std::make_unique<BoundRope>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, ActivationOp>) {
          return std::make_unique<BoundActivation>(spec, bindings, narrowing);
        } else if constexpr (std::is_same_v<Type, SelectOp>) {
          return std::make_unique<BoundSelect>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, AddOp>) {
          return std::make_unique<BoundAdd>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, ConcatOp>) {
          return std::make_unique<BoundConcat>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, RouteOp> || std::is_same_v<Type, ExpertsOp>) {
          return bind_mixture(spec, bindings);
        } else {
          return bind_attention(spec, rope, bindings);
        }
      },
      op);
}

}  // namespace

std::vector<std::unique_ptr<BoundOp>> bind_ops(const Bindings& bindings) {
  std::vector<const Op*> ops;
  std::vector<const UnitSpec*> units;  // of the ops
  for (const UnitSpec& unit : bindings.spec.units) {
    for (const Op& op : unit.ops) {
      ops.push_back(&op);
      units.push_back(&unit);
    }
  }
  std::vector<std::unique_ptr<BoundOp>> bound;
  DType narrowed = DType::kF32;
  for (size_t i = 0; i < ops.size(); ++i) {
    const auto* rope = std::get_if<RopeOp>(ops[i]);
    const bool fuse =
        rope != nullptr && i + 1 < ops.size() && rotates_keys_of(*rope, *ops[i + 1], bindings);
    if (fuse) ++i;
    Narrowing narrowing;
    if (i + 1 < ops.size()) {
      narrowing = narrowing_between(*bindings.spec.plan, *ops[i], *units[i + 1], *ops[i + 1],
                                    bindings.panel.dtype);
    }
    bound.push_back(bind_op(*ops[i], fuse ? rope : nullptr, narrowed, narrowing, bindings));
    narrowed = narrowing.dtype;
  }
  return bound;
}

}  // namespace helm::cuda
