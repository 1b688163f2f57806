#include "cuda/ops.h"

#include <type_traits>
#include <variant>

#include "cuda/narrowing.h"

namespace helm::cuda {
namespace {

int64_t rows_of(const StepContext& context, bool per_output) {
  return per_output ? context.shape.outputs : context.shape.tokens;
}

class BoundEmbedding : public BoundOp {
 public:
  BoundEmbedding(const EmbeddingOp& op, const Bindings& b)
      : args_{b.weight(op.table), b.dtype(op.table), b.value(op.out), b.width(op.out), 0} {}
  const char* name() const override { return "embedding"; }
  void launch(const StepContext& context) const override {
    EmbeddingArgs args = args_;
    args.tokens = context.shape.tokens;
    embedding(args, context.tables, context.stream);
  }

 private:
  EmbeddingArgs args_;
};

class BoundPositionEmbedding : public BoundOp {
 public:
  BoundPositionEmbedding(const PositionEmbeddingOp& op, const Bindings& b)
      : args_{b.weight(op.table), b.dtype(op.table), op.offset,
              b.value(op.out),    b.width(op.out),   0} {}
  const char* name() const override { return "position_embedding"; }
  void launch(const StepContext& context) const override {
    PositionEmbeddingArgs args = args_;
    args.tokens = context.shape.tokens;
    position_embedding(args, context.tables, context.stream);
  }

 private:
  PositionEmbeddingArgs args_;
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
  }
  const char* name() const override { return "norm"; }
  void launch(const StepContext& context) const override {
    NormArgs args = args_;
    args.rows = rows_of(context, per_output_);
    narrow_many(&args);
    if (args.rows > 0) norm(args, context.stream);
  }

 private:
  NormArgs args_{};
  bool per_output_;
};

// Few rows: one product per run of parts that reads the weights once, in f32. Many rows: cuBLAS,
// with the input narrowed to the weights' dtype, here or by the op before.
class BoundLinear : public BoundOp {
 public:
  BoundLinear(const LinearOp& op, const Bindings& b, DType narrowed)
      : per_output_(b.per_output(op.in)),
        in_(b.value(op.in)),
        cols_(b.width(op.in)),
        out_(b.value(op.out)),
        out_width_(b.width(op.out)),
        accumulate_(op.accumulate),
        narrow_(b.narrow),
        narrowed_(narrowed) {
    int64_t column = 0;
    for (const LinearOp::Part& part : op.parts) {
      const int64_t rows = b.tensor(part.weight).rows();
      add_part({b.weight(part.weight), b.dtype(part.weight), b.vector(part.bias), column, rows});
      column += rows;
    }
  }
  const char* name() const override { return "linear"; }
  void launch(const StepContext& context) const override {
    const int64_t rows = rows_of(context, per_output_);
    if (rows == 0) return;
    if (rows <= kMatvecTokens) {
      for (const Part& part : parts_) launch_matvec(part, rows, context);
    } else {
      launch_products(rows, context);
    }
  }

 private:
  struct Part {
    const void* weight;  // [rows, cols]
    DType dtype;
    const float* bias;  // [rows] or null
    int64_t column;     // of the stacked output
    int64_t rows;
  };

  // Parts whose weights and biases lie one after the other are one product.
  void add_part(const Part& part) {
    if (!parts_.empty()) {
      Part& last = parts_.back();
      const auto* end =
          static_cast<const std::byte*>(last.weight) + last.rows * cols_ * dtype_bytes(last.dtype);
      const bool biases = part.bias == (last.bias == nullptr ? nullptr : last.bias + last.rows);
      if (part.weight == end && part.dtype == last.dtype && biases) {
        last.rows += part.rows;
        return;
      }
    }
    parts_.push_back(part);
  }

  void launch_matvec(const Part& part, int64_t tokens, const StepContext& context) const {
    MatvecArgs args{};
    args.a = in_;
    args.a_stride = cols_;
    args.tokens = tokens;
    args.w = part.weight;
    args.dtype = part.dtype;
    args.rows = part.rows;
    args.cols = cols_;
    args.bias = part.bias;
    args.accumulate = accumulate_;
    args.c = out_ + part.column;
    args.c_stride = out_width_;
    matvec(args, context.stream);
  }

  void launch_products(int64_t tokens, const StepContext& context) const {
    DType narrowed = narrowed_;
    for (const Part& part : parts_) {
      const void* a = in_;
      if (part.dtype != DType::kF32) {
        if (part.dtype != narrowed) {
          narrow(in_, cols_, tokens, cols_, part.dtype, narrow_, context.stream);
          narrowed = part.dtype;
        }
        a = narrow_;
      }
      float* const c = out_ + part.column;
      context.blas.multiply({a, cols_, part.weight, part.dtype, tokens, part.rows, cols_,
                             accumulate_, c, out_width_});
      if (part.bias != nullptr) {
        add_bias(part.bias, tokens, part.rows, c, out_width_, context.stream);
      }
    }
  }

  bool per_output_;
  const float* in_;  // [rows, cols]
  int64_t cols_;
  float* out_;  // [rows, out_width]
  int64_t out_width_;
  bool accumulate_;
  void* narrow_;
  DType narrowed_;  // what that holds of the input before; f32: nothing
  std::vector<Part> parts_;
};

class BoundRope : public BoundOp {
 public:
  BoundRope(const RopeOp& op, const Bindings& b) : args_(bind_rope(op, b)) {}
  const char* name() const override { return "rope"; }
  void launch(const StepContext& context) const override {
    RopeArgs args = args_;
    args.tokens = context.shape.tokens;
    rope(args, context.tables, context.stream);
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
  }
  const char* name() const override { return "activation"; }
  void launch(const StepContext& context) const override {
    ActivationArgs args = args_;
    args.rows = rows_of(context, per_output_);
    narrow_many(&args);
    if (args.rows > 0) activation(args, context.stream);
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
    select(in_, out_, width_, context.shape.outputs, context.tables, context.stream);
  }

 private:
  const float* in_;  // [tokens, width]
  float* out_;       // [outputs, width]
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
          return std::make_unique<BoundLinear>(spec, bindings, narrowed);
        } else if constexpr (std::is_same_v<Type, RopeOp>) {
          return std::make_unique<BoundRope>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, ActivationOp>) {
          return std::make_unique<BoundActivation>(spec, bindings, narrowing);
        } else if constexpr (std::is_same_v<Type, SelectOp>) {
          return std::make_unique<BoundSelect>(spec, bindings);
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
      narrowing = narrowing_between(*bindings.spec.plan, *ops[i], *units[i + 1], *ops[i + 1]);
    }
    bound.push_back(bind_op(*ops[i], fuse ? rope : nullptr, narrowed, narrowing, bindings));
    narrowed = narrowing.dtype;
  }
  return bound;
}

}  // namespace helm::cuda
