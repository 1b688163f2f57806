#include "cuda/ops.h"

#include <optional>
#include <type_traits>
#include <variant>

#include "base/check.h"

namespace helm::cuda {
namespace {

int64_t rows_of(const StepContext& context, bool per_output) {
  return per_output ? context.shape.outputs : context.shape.tokens;
}

class BoundEmbedding : public BoundOp {
 public:
  BoundEmbedding(const EmbeddingOp& op, const Bindings& b)
      : args_{b.weight(op.table), b.tensor(op.table).dtype, b.value(op.out), b.width(op.out), 0} {}
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
      : args_{b.weight(op.table), b.tensor(op.table).dtype, op.offset,
              b.value(op.out),    b.width(op.out),          0} {}
  const char* name() const override { return "position_embedding"; }
  void launch(const StepContext& context) const override {
    PositionEmbeddingArgs args = args_;
    args.tokens = context.shape.tokens;
    position_embedding(args, context.tables, context.stream);
  }

 private:
  PositionEmbeddingArgs args_;
};

class BoundNorm : public BoundOp {
 public:
  BoundNorm(const NormOp& op, const Bindings& b) : per_output_(b.per_output(op.in)) {
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
    if (args.rows > 0) norm(args, context.stream);
  }

 private:
  NormArgs args_{};
  bool per_output_;
};

// Few rows: one product per part that reads the weights once, in f32. Many rows: cuBLAS, with the
// input narrowed to the weights' dtype.
class BoundLinear : public BoundOp {
 public:
  BoundLinear(const LinearOp& op, const Bindings& b)
      : per_output_(b.per_output(op.in)),
        in_(b.value(op.in)),
        cols_(b.width(op.in)),
        out_(b.value(op.out)),
        out_width_(b.width(op.out)),
        accumulate_(op.accumulate),
        narrow_(b.narrow) {
    int64_t column = 0;
    for (const LinearOp::Part& part : op.parts) {
      const TensorSpec& spec = b.tensor(part.weight);
      parts_.push_back(
          {b.weight(part.weight), spec.dtype, b.vector(part.bias), column, spec.shape[0]});
      column += spec.shape[0];
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
    DType narrowed = DType::kF32;  // what the narrow buffer holds; f32: nothing yet
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
  std::vector<Part> parts_;
};

RopeArgs bind_rope(const RopeOp& op, const Bindings& b) {
  RopeArgs args{};
  args.x = b.value(op.value);
  args.width = b.width(op.value);
  args.offset = op.offset;
  args.heads = op.heads;
  args.head_dim = op.head_dim;
  args.rotary = op.rotary;
  args.inv_freq = b.upload.inverse_frequencies(op.table);
  args.factor = b.spec.plan->rope[static_cast<size_t>(op.table)].attention_factor;
  return args;
}

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

// Whether append() can rotate on the way: the rope's heads end with the k heads.
bool fusable(const RopeOp& rope, const AttentionOp& attention) {
  return rope.value == attention.in && rope.head_dim == attention.head_dim &&
         rope.offset <= attention.k_offset &&
         rope.offset + rope.heads * rope.head_dim ==
             attention.k_offset + attention.kv_heads * attention.head_dim;
}

class BoundAttention : public BoundOp {
 public:
  BoundAttention(const AttentionOp& op, const RopeOp* rope, const Bindings& b) {
    if (op.head_dim > kMaxHeadDim) {
      fail(ErrorKind::kInvalid, "[cuda] attention heads of ", op.head_dim, " elements, at most ",
           kMaxHeadDim, " are supported; place the block on the CPU");
    }
    const KvSpec& spec = b.spec.plan->kv;
    if (kv_scale_bytes(spec.dtype) > 0) {
      fail(ErrorKind::kInvalid, "[cuda] the KV cache is i8, attention on CUDA reads f32, f16 and ",
           "bf16; choose one of those with --kv-dtype, or place the blocks on the CPU");
    }
    const KvPool kv{reinterpret_cast<void*>(b.spec.kv), spec.dtype, spec.page_tokens, spec.kv_heads,
                    spec.head_dim};
    const int64_t layer = b.upload.layout().layer_index(op.layer);
    if (rope != nullptr) rope_ = bind_rope(*rope, b);
    append_.x = b.value(op.in);
    append_.width = b.width(op.in);
    append_.k_offset = op.k_offset;
    append_.v_offset = op.v_offset;
    append_.layer = layer;
    append_.kv = kv;
    attention_.x = b.value(op.in);
    attention_.width = b.width(op.in);
    attention_.q_offset = op.q_offset;
    attention_.out = b.value(op.out);
    attention_.heads = op.heads;
    attention_.scale = op.scale;
    attention_.window = op.window;
    attention_.layer = layer;
    attention_.kv = kv;
    attention_.partials = b.partials;
  }
  const char* name() const override { return "attention"; }
  void launch(const StepContext& context) const override {
    std::optional<RopeArgs> rotate = rope_;
    AppendArgs appended = append_;
    appended.tokens = context.shape.tokens;
    if (rotate) {
      rotate->tokens = context.shape.tokens;
      appended.rotate = &*rotate;
    }
    append(appended, context.tables, context.stream);
    AttentionArgs attended = attention_;
    attended.tokens = context.shape.tokens;
    attended.runs = context.shape.runs;
    attended.splits = context.shape.splits;
    attention(attended, context.tables, context.stream);
  }

 private:
  std::optional<RopeArgs> rope_;
  AppendArgs append_{};
  AttentionArgs attention_{};
};

class BoundActivation : public BoundOp {
 public:
  BoundActivation(const ActivationOp& op, const Bindings& b) : per_output_(b.per_output(op.in)) {
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

std::unique_ptr<BoundOp> bind_op(const Op& op, const RopeOp* rope, const Bindings& bindings) {
  return std::visit(
      [&](const auto& spec) -> std::unique_ptr<BoundOp> {
        using Type = std::decay_t<decltype(spec)>;
        if constexpr (std::is_same_v<Type, EmbeddingOp>) {
          return std::make_unique<BoundEmbedding>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, PositionEmbeddingOp>) {
          return std::make_unique<BoundPositionEmbedding>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, NormOp>) {
          return std::make_unique<BoundNorm>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, LinearOp>) {
          return std::make_unique<BoundLinear>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, RopeOp>) {
          return std::make_unique<BoundRope>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, AttentionOp>) {
          return std::make_unique<BoundAttention>(spec, rope, bindings);
        } else if constexpr (std::is_same_v<Type, ActivationOp>) {
          return std::make_unique<BoundActivation>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, SelectOp>) {
          return std::make_unique<BoundSelect>(spec, bindings);
        } else {
          static_assert(std::is_same_v<Type, AppendOp> || std::is_same_v<Type, ResetOp> ||
                        std::is_same_v<Type, AttendOp> || std::is_same_v<Type, MergeOp>);
          fail(ErrorKind::kInvalid,
               "[cuda] KV pages of one layer in several memories are not supported on CUDA devices "
               "yet; choose a smaller context or fewer blocks on the accelerator");
        }
      },
      op);
}

}  // namespace

std::vector<std::unique_ptr<BoundOp>> bind_ops(const Bindings& bindings) {
  std::vector<const Op*> ops;
  for (const UnitSpec& unit : bindings.spec.units) {
    for (const Op& op : unit.ops) ops.push_back(&op);
  }
  std::vector<std::unique_ptr<BoundOp>> bound;
  for (size_t i = 0; i < ops.size(); ++i) {
    const auto* rope = std::get_if<RopeOp>(ops[i]);
    const auto* attention = i + 1 < ops.size() ? std::get_if<AttentionOp>(ops[i + 1]) : nullptr;
    const bool fuse = rope != nullptr && attention != nullptr && fusable(*rope, *attention);
    if (fuse) ++i;
    bound.push_back(bind_op(*ops[i], fuse ? rope : nullptr, bindings));
  }
  return bound;
}

}  // namespace helm::cuda
