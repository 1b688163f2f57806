// Attention bound as launches: whole, or in pieces for KV pages that lie in several memories.
#include <optional>
#include <variant>

#include "base/check.h"
#include "cuda/ops.h"

namespace helm::cuda {
namespace {

KvPool pool_of(const Bindings& b, int64_t entry) {
  const KvSpec& spec = b.spec.plan->kv;
  const auto e = static_cast<size_t>(entry);
  if (kv_scale_bytes(spec.dtype) > 0) {
    fail(ErrorKind::kInvalid, "[cuda] the KV cache is i8, attention on CUDA reads f32, f16 and ",
         "bf16; choose one of those for it, or place the blocks on the CPU");
  }
  return {reinterpret_cast<void*>(b.spec.kv[e]), spec.dtype, spec.page_tokens,
          spec.layers[e].kv_heads, spec.head_dim};
}

// The part of an attention op that appends.
AppendOp append_of(const AttentionOp& op) {
  return {op.in, op.k_offset, op.v_offset, op.layer};
}

// Where an attention op or one of its pieces reads; its result goes nowhere yet.
template <class Attending>
AttentionArgs bind_attending(const Attending& op, const Bindings& b) {
  if (op.head_dim > kMaxHeadDim) {
    fail(ErrorKind::kInvalid, "[cuda] attention heads of ", op.head_dim, " elements, at most ",
         kMaxHeadDim, " are supported; place the block on the CPU");
  }
  AttentionArgs args{};
  args.x = b.value(op.in);
  args.width = b.width(op.in);
  args.q_offset = op.q_offset;
  args.heads = op.heads;
  args.scale = op.scale;
  args.window = op.window;
  args.softcap = op.softcap;
  args.cap_inverse = op.softcap == 0 ? 0 : 2 / op.softcap;
  args.layer = op.layer;
  args.kv = pool_of(b, op.layer);
  args.partials = b.partials;
  args.compute = b.compute;
  return args;
}

void launch_attention(AttentionArgs args, const StepContext& context) {
  args.tokens = context.shape.tokens;
  args.rows = context.shape.rows;
  args.runs = context.shape.runs;
  args.singles = context.shape.singles;
  args.decode_splits = context.shape.decode_splits;
  args.prompt_splits = context.shape.prompt_splits;
  attention(args, context.tables, context.queue);
}

class BoundAppend : public BoundOp {
 public:
  BoundAppend(const AppendOp& op, const RopeOp* rope, const Bindings& b) {
    if (rope != nullptr) rope_ = bind_rope(*rope, b);
    args_.x = b.value(op.in);
    args_.width = b.width(op.in);
    args_.k_offset = op.k_offset;
    args_.v_offset = op.v_offset;
    args_.layer = op.layer;
    args_.kv = pool_of(b, op.layer);
  }
  const char* name() const override { return "append"; }
  void launch(const StepContext& context) const override {
    std::optional<RopeArgs> rotate = rope_;
    AppendArgs args = args_;
    args.tokens = context.shape.tokens;
    if (rotate) {
      rotate->tokens = context.shape.tokens;
      args.rotate = &*rotate;
    }
    append(args, context.tables, context.queue);
  }

 private:
  std::optional<RopeArgs> rope_;
  AppendArgs args_{};
};

class BoundAttention : public BoundOp {
 public:
  BoundAttention(const AttentionOp& op, const RopeOp* rope, const Bindings& b)
      : append_(append_of(op), rope, b), args_(bind_attending(op, b)) {
    args_.out = b.value(op.out);
    args_.sinks = b.vector(op.sinks);
  }
  const char* name() const override { return "attention"; }
  void launch(const StepContext& context) const override {
    append_.launch(context);
    launch_attention(args_, context);
  }

 private:
  BoundAppend append_;
  AttentionArgs args_;
};

class BoundReset : public BoundOp {
 public:
  BoundReset(const ResetOp& op, const Bindings& b) : op_(op), partial_(b.value(op.partial)) {}
  const char* name() const override { return "reset"; }
  void launch(const StepContext& context) const override {
    reset_partial(partial_, context.shape.tokens, op_.heads, op_.head_dim, context.queue);
  }

 private:
  ResetOp op_;
  float* partial_;  // [tokens, heads * (head_dim + 2)]
};

class BoundAttend : public BoundOp {
 public:
  BoundAttend(const AttendOp& op, const Bindings& b) : args_(bind_attending(op, b)) {
    args_.partial = b.value(op.partial);
  }
  const char* name() const override { return "attend"; }
  void launch(const StepContext& context) const override { launch_attention(args_, context); }

 private:
  AttentionArgs args_;
};

class BoundMerge : public BoundOp {
 public:
  BoundMerge(const MergeOp& op, const Bindings& b)
      : args_{b.value(op.first), b.value(op.second), b.value(op.out), op.heads, op.head_dim, 0,
              b.vector(op.sinks)} {}
  const char* name() const override { return "merge"; }
  void launch(const StepContext& context) const override {
    MergeArgs args = args_;
    args.tokens = context.shape.tokens;
    merge_partials(args, context.queue);
  }

 private:
  MergeArgs args_;
};

}  // namespace

RopeArgs bind_rope(const RopeOp& op, const Bindings& b) {
  RopeArgs args{};
  args.x = b.value(op.value);
  args.width = b.width(op.value);
  args.offset = op.offset;
  args.heads = op.heads;
  args.head_dim = op.head_dim;
  args.rotary = op.rotary;
  args.neighbours = op.neighbours;
  args.inv_freq = b.upload.inverse_frequencies(op.table);
  args.factor = b.spec.plan->rope[static_cast<size_t>(op.table)].attention_factor;
  return args;
}

bool rotates_keys_of(const RopeOp& rope, const Op& op, const Bindings& bindings) {
  const auto* attention = std::get_if<AttentionOp>(&op);
  const auto* append = std::get_if<AppendOp>(&op);
  if (attention == nullptr && append == nullptr) return false;
  const AppendOp keys = attention != nullptr ? append_of(*attention) : *append;
  const KvSpec& kv = bindings.spec.plan->kv;
  const int64_t kv_heads = kv.layers[static_cast<size_t>(keys.layer)].kv_heads;
  return rope.value == keys.in && rope.head_dim == kv.head_dim && rope.offset <= keys.k_offset &&
         rope.offset + rope.heads * rope.head_dim == keys.k_offset + kv_heads * kv.head_dim;
}

std::unique_ptr<BoundOp> bind_attention(const AttentionOp& op, const RopeOp* rope,
                                        const Bindings& bindings) {
  return std::make_unique<BoundAttention>(op, rope, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const AppendOp& op, const RopeOp* rope,
                                        const Bindings& bindings) {
  return std::make_unique<BoundAppend>(op, rope, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const ResetOp& op, const RopeOp*,
                                        const Bindings& bindings) {
  return std::make_unique<BoundReset>(op, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const AttendOp& op, const RopeOp*,
                                        const Bindings& bindings) {
  return std::make_unique<BoundAttend>(op, bindings);
}
std::unique_ptr<BoundOp> bind_attention(const MergeOp& op, const RopeOp*,
                                        const Bindings& bindings) {
  return std::make_unique<BoundMerge>(op, bindings);
}

}  // namespace helm::cuda
