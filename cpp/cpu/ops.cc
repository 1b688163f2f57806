// The ops of a CPU stage except attention: each splits its rows or tokens over the team and calls
// the kernels of the chosen tier.
#include <algorithm>
#include <cstring>
#include <optional>
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

class BoundEmbedding : public BoundOp {
 public:
  BoundEmbedding(const EmbeddingOp& op, const Bindings& b)
      : table_(b.matrix(op.table)),
        out_(b.value(op.out)),
        width_(b.width(op.out)),
        scale_(op.scale),
        kernel_(b.kernels.activation) {}

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step.tokens(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = out_ + t * width_;
        table_->read_row(step.token_ids[static_cast<size_t>(t)], row);
        if (scale_ == 1) continue;
        kernel_({Activation::kScale, false, row, width_, row, width_, 1, width_, scale_});
      }
    });
  }

 private:
  std::unique_ptr<Matrix> table_;  // [vocab, width]
  float* out_;                     // [tokens, width]
  int64_t width_;
  float scale_;
  void (*kernel_)(const ActivationArgs&);
};

class BoundPositionEmbedding : public BoundOp {
 public:
  BoundPositionEmbedding(const PositionEmbeddingOp& op, const Bindings& b)
      : table_(b.matrix(op.table)),
        out_(b.value(op.out)),
        width_(b.width(op.out)),
        offset_(op.offset),
        kernels_(b.kernels),
        scratch_(b.scratch) {}

  void run(const StepView& step, Team& team) const override {
    auto* row = reinterpret_cast<float*>(scratch_[static_cast<size_t>(team.worker())]);
    for_tokens(team, step.tokens(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        table_->read_row(step.positions[static_cast<size_t>(t)] + offset_, row);
        kernels_.add(row, out_ + t * width_, width_);
      }
    });
  }

 private:
  std::unique_ptr<Matrix> table_;  // [positions, width]
  float* out_;                     // [tokens, width]
  int64_t width_;
  int64_t offset_;
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
    args_.weight_plus = op.weight_plus;
    args_.accumulate = op.accumulate;
  }

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step_rows(step, per_output_), [&](int64_t begin, int64_t end) {
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
        scratch_(b.scratch),
        packed_(b.packed),
        cols_(b.width(op.in)),
        all_(LinearRows::of(b.plan, op, [&](TensorIndex weight) { return b.format(weight); })),
        pieces_(decode_pieces(all_, static_cast<int>(b.scratch.size()))) {
    for (const LinearOp::Part& part : op.parts) {
      parts_.push_back({b.matrix(part.weight), b.vector(part.bias), all_.first_row[parts_.size()]});
    }
    args_.a = b.value(op.in);
    args_.a_stride = cols_;
    args_.cols = cols_;
    args_.accumulate = op.accumulate;
    args_.c = b.value(op.out);
    args_.c_stride = all_.rows();
    args_.packed = packed_;
  }
  void set_next(const BoundOp& op) override { next_ = &op; }

  void run(const StepView& step, Team& team) const override {
    const int64_t tokens = step_rows(step, per_output_);
    if (tokens == 0) return;
    if (tokens > kDecodeTokens) return run_prefill(tokens, team);
    FirstReads reads;
    if (next_ != nullptr && tokens > parts_.front().weight->read_after_tokens()) {
      next_->first_reads(step, team, reads);
    }
    ReadAfter after = reads.list();
    std::optional<InputKind> before;  // of this member's last piece
    team.parallel_for(static_cast<int64_t>(pieces_.size()), 1, [&](int64_t index, int64_t) {
      const DecodePiece& piece = pieces_[static_cast<size_t>(index)];
      if (piece.rows == 0) return;
      const Part& part = parts_[piece.part];
      MatmulArgs args = args_;
      args.slice = piece.slice;
      args.slices = piece.slices;
      args.same_input = before == part.weight->input_kind();
      before = part.weight->input_kind();
      args.after = &after;
      run_rows(part, piece.first_row, piece.rows, args, tokens, team.worker());
    });
  }

 private:
  struct Part {
    std::unique_ptr<Matrix> weight;  // [rows, cols]
    const float* bias;               // [rows] or null
    int64_t first_row;               // of the stacked output
  };

  // Parts that take the same packed input are computed together; nearly always that is all.
  void run_prefill(int64_t tokens, Team& team) const {
    const PrefillPieces pieces(all_.rows(), team.size());
    for (size_t first = 0, end = 0; first < parts_.size(); first = end) {
      if (first > 0) team.barrier();
      const Matrix& weight = *parts_[first].weight;
      while (end < parts_.size() && weight.packs_as(*parts_[end].weight)) ++end;
      pack(weight, tokens, team);
      team.parallel_for(pieces.count(), 1, [&](int64_t index, int64_t) {
        const PrefillPieces::Piece piece = pieces.at(index);
        for (size_t i = first; i < end; ++i) {
          const Team::Part rows = all_.rows_of(i, piece.row, piece.end_row);
          if (rows.begin == rows.end) continue;
          run_rows(parts_[i], rows.begin, rows.end - rows.begin, args_, tokens, team.worker());
        }
      });
    }
  }

  void pack(const Matrix& weight, int64_t tokens, Team& team) const {
    const int64_t tiles = weight.tiles_to_pack(tokens);
    if (tiles == 0) return;
    const PackArgs args{args_.a, args_.a_stride, tokens, cols_, packed_};
    team.parallel_for(tiles, 1, [&](int64_t tile, int64_t) { weight.pack(args, tile); });
    team.barrier();
  }

  void run_rows(const Part& part, int64_t first, int64_t rows, MatmulArgs args, int64_t tokens,
                int worker) const {
    args.tokens = tokens;
    args.rows = rows;
    args.bias = part.bias == nullptr ? nullptr : part.bias + first;
    args.c += part.first_row + first;
    args.scratch = scratch_[static_cast<size_t>(worker)];
    part.weight->multiply(args, first);
  }

  bool per_output_;
  const std::vector<std::byte*>& scratch_;
  std::byte* packed_;
  const BoundOp* next_ = nullptr;  // an op whose reads are asked for
  int64_t cols_;
  LinearRows all_;
  std::vector<DecodePiece> pieces_;
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
    args_.neighbours = op.neighbours;
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
    args_.factor = op.factor;
    args_.accumulate = op.accumulate;
  }

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step_rows(step, per_output_), [&](int64_t begin, int64_t end) {
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

class BoundAdd : public BoundOp {
 public:
  BoundAdd(const AddOp& op, const Bindings& b)
      : per_output_(b.per_output(op.out)),
        in_(b.value(op.in)),
        out_(b.value(op.out)),
        width_(b.width(op.out)),
        kernels_(b.kernels) {}

  void run(const StepView& step, Team& team) const override {
    for_tokens(team, step_rows(step, per_output_), [&](int64_t begin, int64_t end) {
      kernels_.add(in_ + begin * width_, out_ + begin * width_, (end - begin) * width_);
    });
  }

 private:
  bool per_output_;
  const float* in_;  // [rows, width]
  float* out_;       // [rows, width]
  int64_t width_;
  const KernelTable& kernels_;
};

class BoundConcat : public BoundOp {
 public:
  BoundConcat(const ConcatOp& op, const Bindings& b)
      : per_output_(b.per_output(op.out)), out_(b.value(op.out)), width_(b.width(op.out)) {
    for (const ValueIndex in : op.ins) ins_.push_back({b.value(in), b.width(in)});
  }

  void run(const StepView& step, Team& team) const override {
    const int64_t pieces = (width_ + kPiece - 1) / kPiece;  // of a row
    team.parallel_for(step_rows(step, per_output_) * pieces, 1, [&](int64_t index, int64_t) {
      const int64_t row = index / pieces, begin = index % pieces * kPiece;
      copy(row, begin, std::min(begin + kPiece, width_));
    });
  }

 private:
  static constexpr int64_t kPiece = int64_t{1} << 14;  // columns; outweigh taking them
  struct In {
    const float* data;  // [rows, width]
    int64_t width;
  };

  void copy(int64_t row, int64_t begin, int64_t end) const {
    int64_t first = 0;  // column of the input
    for (const In& in : ins_) {
      const int64_t from = std::max(begin, first), to = std::min(end, first + in.width);
      if (from < to) {
        std::memcpy(out_ + row * width_ + from, in.data + row * in.width + from - first,
                    static_cast<size_t>(to - from) * sizeof(float));
      }
      first += in.width;
    }
  }

  bool per_output_;
  std::vector<In> ins_;
  float* out_;  // [rows, width]
  int64_t width_;
};

static_assert(static_cast<int>(ActivationKind::kSilu) == static_cast<int>(Activation::kSilu) &&
              static_cast<int>(ActivationKind::kSwigluLimit) ==
                  static_cast<int>(Activation::kSwigluLimit));

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
        } else if constexpr (std::is_same_v<Type, AddOp>) {
          return std::make_unique<BoundAdd>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, ConcatOp>) {
          return std::make_unique<BoundConcat>(spec, bindings);
        } else if constexpr (std::is_same_v<Type, RouteOp> || std::is_same_v<Type, ExpertsOp>) {
          return bind_mixture(spec, bindings);
        } else {
          static_assert(std::is_same_v<Type, SelectOp>);
          return std::make_unique<BoundSelect>(spec, bindings);
        }
      },
      op);
}

}  // namespace helm::cpu
