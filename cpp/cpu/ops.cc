// The ops of a CPU stage except attention: each splits its rows or tokens over the team and calls
// the kernels of the chosen tier.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <variant>

#include "base/arena.h"
#include "cpu/linear_rows.h"
#include "cpu/stage.h"

namespace helm::cpu {
namespace {

// Splits `tokens` over the team. Small pieces keep all members busy to the end; each must outweigh
// taking it (about 100 ns). Of few tokens, as decode has, every member gets some.
template <typename Work>
void for_tokens(Team& team, int64_t tokens, const Work& work) {
  constexpr int64_t kMostPerPiece = 4;
  team.parallel_for(tokens, std::clamp<int64_t>(tokens / team.size(), 1, kMostPerPiece), work);
}

int64_t rows_of(const StepView& step, bool per_output) {
  return per_output ? step.outputs() : step.tokens();
}

class BoundEmbedding : public BoundOp {
 public:
  BoundEmbedding(const EmbeddingOp& op, const Bindings& b)
      : table_(static_cast<const std::byte*>(b.weight(op.table))),
        out_(b.value(op.out)),
        width_(b.width(op.out)),
        row_bytes_(width_ * dtype_bytes(b.plan.tensors[static_cast<size_t>(op.table)].dtype)),
        widen_(b.kernels
                   .widen[static_cast<int>(b.plan.tensors[static_cast<size_t>(op.table)].dtype)]) {}

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step.tokens(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t token = step.token_ids[static_cast<size_t>(t)];
        widen_(table_ + token * row_bytes_, out_ + t * width_, width_);
      }
    });
  }

 private:
  const std::byte* table_;  // [vocab, width]
  float* out_;              // [tokens, width]
  int64_t width_;
  int64_t row_bytes_;
  void (*widen_)(const void*, float*, int64_t);
};

class BoundPositionEmbedding : public BoundOp {
 public:
  BoundPositionEmbedding(const PositionEmbeddingOp& op, const Bindings& b)
      : table_(static_cast<const std::byte*>(b.weight(op.table))),
        out_(b.value(op.out)),
        width_(b.width(op.out)),
        offset_(op.offset),
        dtype_(b.plan.tensors[static_cast<size_t>(op.table)].dtype),
        kernels_(b.kernels),
        scratch_(b.scratch) {}

  void run(const StepView& step, Team& team) const override {
    auto* row = reinterpret_cast<float*>(scratch_[static_cast<size_t>(team.worker())]);
    const int64_t row_bytes = width_ * dtype_bytes(dtype_);
    for_tokens(team, step.tokens(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t position = step.positions[static_cast<size_t>(t)];
        kernels_.widen[static_cast<int>(dtype_)](table_ + (position + offset_) * row_bytes, row,
                                                 width_);
        kernels_.add(row, out_ + t * width_, width_);
      }
    });
  }

 private:
  const std::byte* table_;  // [positions, width]
  float* out_;              // [tokens, width]
  int64_t width_;
  int64_t offset_;
  DType dtype_;
  const KernelTable& kernels_;
  const std::vector<std::byte*>& scratch_;
};

class BoundNorm : public BoundOp {
 public:
  BoundNorm(const NormOp& op, const Bindings& b)
      : per_output_(b.per_output(op.in)),
        kernel_(op.layer_norm ? b.kernels.layer_norm : b.kernels.rms_norm) {
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

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, rows_of(step, per_output_), [&](int64_t begin, int64_t end) {
      NormArgs args = args_;
      args.x += begin * args.x_stride;
      args.y += begin * args.y_stride;
      args.tokens = end - begin;
      kernel_(args);
    });
  }

 private:
  NormArgs args_{};
  bool per_output_;
  void (*kernel_)(const NormArgs&);
};

class BoundLinear : public BoundOp {
 public:
  BoundLinear(const LinearOp& op, const Bindings& b)
      : per_output_(b.per_output(op.in)),
        kernels_(b.kernels),
        scratch_(b.scratch),
        packed_(b.packed),
        cols_(b.width(op.in)),
        all_(LinearRows::of(b.plan, op)) {
    int64_t first_row = 0;
    for (const LinearOp::Part& part : op.parts) {
      const TensorSpec& spec = b.plan.tensors[static_cast<size_t>(part.weight)];
      parts_.push_back({static_cast<const std::byte*>(b.weight(part.weight)), b.vector(part.bias),
                        first_row, spec.shape[0], spec.dtype});
      first_row += spec.shape[0];
    }
    args_.a = b.value(op.in);
    args_.a_stride = cols_;
    args_.cols = cols_;
    args_.accumulate = op.accumulate;
    args_.c = b.value(op.out);
    args_.c_stride = all_.rows;
    args_.packed = packed_;
  }

  void run(const StepView& step, Team& team) const override {
    const int64_t tokens = rows_of(step, per_output_);
    if (tokens == 0) return;
    if (tokens > kDecodeTokens) return run_prefill(tokens, team);
    const int64_t piece = all_.decode_piece(team.size());
    team.parallel_for(all_.rows, piece, [&](int64_t begin, int64_t end) {
      for (const Part& part : parts_) run_part(part, begin, end, tokens, team.worker());
    });
  }

 private:
  struct Part {
    const std::byte* weight;  // [rows, cols]
    const float* bias;        // [rows] or null
    int64_t first_row;        // of the stacked output
    int64_t rows;
    DType dtype;
  };

  // Parts that take the same packed input are computed together; nearly always that is all.
  void run_prefill(int64_t tokens, Team& team) const {
    const PrefillPieces pieces(all_.rows, team.size());
    for (size_t first = 0, end = 0; first < parts_.size(); first = end) {
      if (first > 0) team.barrier();
      const DType dtype = parts_[first].dtype;
      while (end < parts_.size() && packed_alike(parts_[end].dtype, dtype)) ++end;
      pack(dtype, tokens, team);
      team.parallel_for(pieces.count(), 1, [&](int64_t index, int64_t) {
        const PrefillPieces::Piece piece = pieces.at(index);
        for (size_t i = first; i < end; ++i) {
          run_part(parts_[i], piece.row, piece.end_row, tokens, team.worker());
        }
      });
    }
  }

  bool packed_alike(DType a, DType b) const {
    const int i = static_cast<int>(a), j = static_cast<int>(b);
    return kernels_.pack[i] == kernels_.pack[j] &&
           kernels_.direct_tokens[i] == kernels_.direct_tokens[j];
  }

  void pack(DType dtype, int64_t tokens, Team& team) const {
    const int64_t tiles = tiles_to_pack(kernels_, dtype, tokens);
    if (tiles == 0) return;
    const PackArgs args{args_.a, args_.a_stride, tokens, cols_, packed_};
    team.parallel_for(tiles, 1, [&](int64_t tile, int64_t) {
      kernels_.pack[static_cast<int>(dtype)](args, tile);
    });
    team.barrier();
  }

  // The rows of [begin, end) that lie in this part.
  void run_part(const Part& part, int64_t begin, int64_t end, int64_t tokens, int worker) const {
    const int64_t first = std::max(begin, part.first_row);
    const int64_t last = std::min(end, part.first_row + part.rows);
    if (first >= last) return;
    MatmulArgs args = args_;
    args.tokens = tokens;
    args.w = part.weight + (first - part.first_row) * cols_ * dtype_bytes(part.dtype);
    args.rows = last - first;
    args.bias = part.bias == nullptr ? nullptr : part.bias + (first - part.first_row);
    args.c += first;
    args.scratch = scratch_[static_cast<size_t>(worker)];
    kernels_.matmul[static_cast<int>(part.dtype)](args);
  }

  bool per_output_;
  const KernelTable& kernels_;
  const std::vector<std::byte*>& scratch_;
  std::byte* packed_;
  int64_t cols_;
  LinearRows all_;
  std::vector<Part> parts_;
  MatmulArgs args_{};
};

class BoundRope : public BoundOp {
 public:
  BoundRope(const RopeOp& op, const Bindings& b) : kernel_(b.kernels.rope) {
    args_.x = b.value(op.value) + op.offset;
    args_.stride = b.width(op.value);
    args_.heads = op.heads;
    args_.head_dim = op.head_dim;
    args_.rotary = op.rotary;
    args_.cos = b.cosines[static_cast<size_t>(op.table)];
    args_.sin = b.sines[static_cast<size_t>(op.table)];
  }

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step.tokens(), [&](int64_t begin, int64_t end) {
      RopeArgs args = args_;
      args.x += begin * args.stride;
      args.cos += begin * (args.rotary / 2);
      args.sin += begin * (args.rotary / 2);
      args.tokens = end - begin;
      kernel_(args);
    });
  }

 private:
  RopeArgs args_{};
  void (*kernel_)(const RopeArgs&);
};

class BoundActivation : public BoundOp {
 public:
  BoundActivation(const ActivationOp& op, const Bindings& b)
      : per_output_(b.per_output(op.in)), kernel_(b.kernels.activation) {
    args_.kind = static_cast<Activation>(op.kind);
    args_.gated = op.gated;
    args_.x = b.value(op.in);
    args_.x_stride = b.width(op.in);
    args_.y = b.value(op.out);
    args_.y_stride = b.width(op.out);
    args_.n = op.size;
  }

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, rows_of(step, per_output_), [&](int64_t begin, int64_t end) {
      ActivationArgs args = args_;
      args.x += begin * args.x_stride;
      args.y += begin * args.y_stride;
      args.tokens = end - begin;
      kernel_(args);
    });
  }

 private:
  ActivationArgs args_{};
  bool per_output_;
  void (*kernel_)(const ActivationArgs&);
};

class BoundSelect : public BoundOp {
 public:
  BoundSelect(const SelectOp& op, const Bindings& b)
      : in_(b.value(op.in)), out_(b.value(op.out)), width_(b.width(op.in)) {}

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step.outputs(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = step.output_rows[static_cast<size_t>(i)];
        std::memcpy(out_ + i * width_, in_ + row * width_,
                    static_cast<size_t>(width_) * sizeof(float));
      }
    });
  }

 private:
  const float* in_;  // [tokens, width]
  float* out_;       // [outputs, width]
  int64_t width_;
};

static_assert(static_cast<int>(ActivationKind::kSilu) == static_cast<int>(Activation::kSilu) &&
              static_cast<int>(ActivationKind::kRelu) == static_cast<int>(Activation::kRelu));

}  // namespace

std::unique_ptr<BoundOp> bind_op(const Op& op, const Bindings& bindings) {
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
        } else if constexpr (std::is_same_v<Type, AttentionOp> || std::is_same_v<Type, AppendOp> ||
                             std::is_same_v<Type, ResetOp> || std::is_same_v<Type, AttendOp> ||
                             std::is_same_v<Type, MergeOp>) {
          return bind_attention(spec, bindings);
        } else if constexpr (std::is_same_v<Type, ActivationOp>) {
          return std::make_unique<BoundActivation>(spec, bindings);
        } else {
          static_assert(std::is_same_v<Type, SelectOp>);
          return std::make_unique<BoundSelect>(spec, bindings);
        }
      },
      op);
}

}  // namespace helm::cpu
