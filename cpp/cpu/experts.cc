// The ops of a mixture of experts on the CPU. Each product has the bits that it has alone, and a
// token's experts are added in ascending order, whatever other tokens there are.
#include "cpu/experts.h"

#include <algorithm>
#include <limits>

#include "base/arena.h"
#include "cpu/route.h"
#include "cpu/stage.h"

namespace helm::cpu {
namespace {

using Worker = ExpertsWorker;
constexpr int64_t kPackedRows = 2;  // by one member at a time
// Of few tokens, what a member starts with at least, so that others can help it at the end.
constexpr int64_t kPiecesPerMember = 4;

// Cuts of an expert's rows where `times` experts are gone through for each: a multiple of the
// members, who have equal parts of the rows of every expert.
int64_t pieces_of(int64_t rows, int64_t times, int64_t tokens, int members) {
  const int64_t least = (rows + Worker::kFewRows - 1) / Worker::kFewRows;
  const int64_t each = tokens > kDecodeTokens ? (rows + Worker::kRows - 1) / Worker::kRows
                                              : (kPiecesPerMember + times - 1) / times * members;
  return align_up(std::max(each, least), members);
}

class BoundRoute : public BoundOp {
 public:
  BoundRoute(const RouteOp& op, const Bindings& b)
      : op_(op),
        per_output_(b.per_output(op.in)),
        in_(b.value(op.in)),
        out_(b.value(op.out)),
        experts_(b.width(op.in)),
        bias_(b.vector(op.bias)),
        scratch_(b.scratch) {}

  void run(const StepView& step, Team& team) const override {
    auto* scratch = reinterpret_cast<float*>(scratch_[static_cast<size_t>(team.worker())]);
    team.parallel_for(step_rows(step, per_output_), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        route(op_, in_ + t * experts_, experts_, bias_, out_ + t * 2 * op_.chosen, scratch);
      }
    });
  }

 private:
  RouteOp op_;
  bool per_output_;
  const float* in_;  // [rows, experts]
  float* out_;       // [rows, 2 * chosen]
  int64_t experts_;
  const float* bias_;  // [experts] or null
  const std::vector<std::byte*>& scratch_;
};

class BoundExperts : public BoundOp {
 public:
  BoundExperts(const ExpertsOp& op, const Bindings& b)
      : op_(op),
        per_output_(b.per_output(op.in)),
        in_(b.value(op.in)),
        routes_(b.value(op.routes)),
        out_(b.value(op.out)),
        in_width_(b.width(op.in)),
        out_width_(b.width(op.out)),
        gate_(b.matrix(op.gate)),
        down_(b.matrix(op.down)),
        gate_bias_(b.vector(op.gate_bias)),
        up_bias_(b.vector(op.up_bias)),
        down_bias_(b.vector(op.down_bias)),
        activation_(b.kernels.activation),
        counts_(b.experts),
        scratch_(b.scratch),
        kernel_bytes_(align_up(std::max(b.kernels.scratch_bytes(0), kCacheLine), kCacheLine)) {
    if (op.up != kNoTensor) up_ = b.matrix(op.up);
    const auto& limits = b.plan.limits;
    const ExpertsRoom room(op, per_output_ ? limits.step_outputs : limits.step_tokens, in_width_);
    const auto at = [&]<typename T>(T*& place, int64_t offset) {
      place = reinterpret_cast<T*>(b.packed + offset);
    };
    at(in_blocks_, room.in_blocks), at(act_, room.act), at(act_blocks_, room.act_blocks);
    at(first_, room.first), at(active_, room.active), at(tokens_, room.tokens);
    at(weights_, room.weights);
  }

  void run(const StepView& step, Team& team) const override {
    const int64_t rows = step_rows(step, per_output_);
    if (rows == 0) return;
    const Matrix& in_reader = reads_blocks(*gate_) || up_ == nullptr ? *gate_ : *up_;
    team.parallel_for(1 + tiles(in_reader, rows), 1, [&](int64_t tile, int64_t) {
      if (tile == 0) return sort_pairs(rows);
      pack(in_reader, {in_, in_width_, rows, in_width_, in_blocks_}, tile - 1);
    });
    team.barrier();
    const int64_t active = active_[0];
    if (counts_ != nullptr && team.worker() == 0) {
      counts_->runs += 1, counts_->rows += rows, counts_->distinct += active;
      counts_->expected += op_.expected(rows);
    }
    const int64_t cuts = pieces_of(op_.size, active, rows, team.size());
    team.parallel_for(cuts * active, 1, [&](int64_t index, int64_t) {
      const auto [begin, end] = expert_rows(index / active, cuts, op_.size);
      activate(active_[1 + index % active], begin, end - begin, team.worker());
    });
    team.barrier();
    const int64_t pairs = rows * op_.chosen;
    if (reads_blocks(*down_)) {
      team.parallel_for(tiles(*down_, pairs), 1, [&](int64_t tile, int64_t) {
        pack(*down_, {act_, op_.size, pairs, op_.size, act_blocks_}, tile);
      });
      team.barrier();
    }
    const int64_t downs = pieces_of(out_width_, 1, rows, team.size());
    team.parallel_for(downs, 1, [&](int64_t index, int64_t) {
      const auto [begin, end] = expert_rows(index, downs, out_width_);
      for (int64_t i = 0; i < active && begin < end; ++i) {
        add_down(active_[1 + i], begin, end - begin, team.worker());
      }
    });
  }

 private:
  struct Scratch {
    void* kernel;
    float* results;   // [kResults]
    float* in_turn;   // [kResults], of gate and up in turn
    float* gathered;  // [kDecodeTokens, most of width(in) and size]
  };
  Scratch scratch(int worker) const {
    std::byte* begin = scratch_[static_cast<size_t>(worker)];
    auto* floats = reinterpret_cast<float*>(begin + kernel_bytes_);
    return {begin, floats, floats + Worker::kResults, floats + 2 * Worker::kResults};
  }

  static bool reads_blocks(const Matrix& matrix) { return matrix.input_kind() == InputKind::kInt8; }
  static int64_t tiles(const Matrix& reader, int64_t rows) {
    return reads_blocks(reader) ? (rows + kPackedRows - 1) / kPackedRows : 0;
  }
  static void pack(const Matrix& reader, const PackArgs& args, int64_t tile) {
    const int64_t first = tile * kPackedRows;
    reader.pack_rows(args, first, std::min(kPackedRows, args.tokens - first));
  }

  // By expert, then token. An id that is none makes NaN of its token.
  void sort_pairs(int64_t rows) const {
    const auto expert = [&](int64_t t, int64_t i) {
      const float id = routes_[t * 2 * op_.chosen + i];
      return id >= 0 && id < static_cast<float>(op_.experts) ? static_cast<int64_t>(id) : -1;
    };
    std::fill_n(first_, op_.experts + 1, 0);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < op_.chosen; ++i) ++first_[std::max<int64_t>(0, expert(t, i)) + 1];
    }
    active_[0] = 0;
    for (int64_t e = 0; e < op_.experts; ++e) {
      if (first_[e + 1] > 0) active_[1 + active_[0]++] = static_cast<int32_t>(e);
      first_[e + 1] += first_[e];
    }
    for (int64_t t = 0; t < rows; ++t) {
      const float* weights = routes_ + t * 2 * op_.chosen + op_.chosen;
      for (int64_t i = 0; i < op_.chosen; ++i) {
        const int64_t e = expert(t, i);
        const int32_t pair = first_[std::max<int64_t>(0, e)]++;
        tokens_[pair] = static_cast<int32_t>(t);
        weights_[pair] = e < 0 ? std::numeric_limits<float>::quiet_NaN() : weights[i];
      }
    }
    for (int64_t e = op_.experts; e > 0; --e) first_[e] = first_[e - 1];
    first_[0] = 0;
  }

  // act of elements [row, row + count) of an expert's pairs.
  void activate(int64_t expert, int64_t row, int64_t count, int worker) const {
    if (count == 0) return;
    const Scratch own = scratch(worker);
    const int64_t width = 2 * count;
    ChosenRows args{};
    args.a = in_, args.a_stride = in_width_, args.packed = in_blocks_;
    args.c_stride = width, args.scratch = own.kernel, args.gathered = own.gathered;
    const auto multiply = [&](const Matrix& matrix, int64_t first, int64_t rows, const float* bias,
                              float* c) {
      args.rows = rows, args.c = c;
      args.bias = bias == nullptr ? nullptr : bias + first;
      matrix.multiply_chosen(args, first);
      args.same_rows = !reads_blocks(matrix);
    };
    const int64_t most = reads_blocks(*gate_) ? Worker::kTokens : kDecodeTokens;
    for (int64_t pair = first_[expert]; pair < first_[expert + 1]; pair += args.tokens) {
      args.tokens = std::min<int64_t>(most, first_[expert + 1] - pair);
      args.same_rows = false;
      args.a_rows = tokens_ + pair;
      const int64_t begin = expert * op_.size + row;
      switch (op_.layout) {
        case GateUp::kApart:
          multiply(*gate_, begin, count, gate_bias_, own.results);
          multiply(*up_, begin, count, up_bias_, own.results + count);
          break;
        case GateUp::kHalves:
          multiply(*gate_, begin + expert * op_.size, count, gate_bias_, own.results);
          multiply(*gate_, begin + (expert + 1) * op_.size, count, gate_bias_, own.results + count);
          break;
        case GateUp::kNeighbours:
          multiply(*gate_, 2 * begin, width, gate_bias_, own.in_turn);
          for (int64_t i = 0; i < args.tokens * width; ++i) {
            const int64_t t = i / width, at = i % width;
            own.results[t * width + at % 2 * count + at / 2] = own.in_turn[i];
          }
      }
      activation_({static_cast<Activation>(op_.activation), true, own.results, width,
                   act_ + pair * op_.size + row, op_.size, args.tokens, count, op_.factor, false});
    }
  }

  // Adds to columns [row, row + count) of the tokens of an expert.
  void add_down(int64_t expert, int64_t row, int64_t count, int worker) const {
    const Scratch own = scratch(worker);
    const int64_t blocks = quant_blocks(op_.size), begin = expert * out_width_ + row;
    ChosenRows args{};
    args.a_stride = op_.size;
    args.rows = count, args.c = own.results, args.c_stride = count;
    args.scratch = own.kernel, args.gathered = own.gathered;
    args.bias = down_bias_ == nullptr ? nullptr : down_bias_ + begin;
    for (int64_t pair = first_[expert]; pair < first_[expert + 1]; pair += args.tokens) {
      args.tokens = std::min<int64_t>(Worker::kTokens, first_[expert + 1] - pair);
      args.a = act_ + pair * op_.size;
      args.packed = act_blocks_ + pair * blocks;
      down_->multiply_chosen(args, begin);
      for (int64_t t = 0; t < args.tokens; ++t) {
        const float weight = weights_[pair + t];
        const float* from = own.results + t * count;
        float* to = out_ + tokens_[pair + t] * out_width_ + row;
        for (int64_t i = 0; i < count; ++i) to[i] += weight * from[i];
      }
    }
  }

  ExpertsOp op_;
  bool per_output_;
  const float* in_;      // [rows, in_width]
  const float* routes_;  // [rows, 2 * chosen]
  float* out_;           // [rows, out_width]
  int64_t in_width_, out_width_;
  std::unique_ptr<Matrix> gate_, up_, down_;
  const float *gate_bias_, *up_bias_, *down_bias_;
  void (*activation_)(const ActivationArgs&);
  ExpertCounts* counts_;  // or null
  const std::vector<std::byte*>& scratch_;
  int64_t kernel_bytes_;
  QuantBlock* in_blocks_;  // what follows is shared, see ExpertsRoom
  float* act_;
  QuantBlock* act_blocks_;
  int32_t *first_, *active_, *tokens_;
  float* weights_;
};

}  // namespace

ExpertsRoom::ExpertsRoom(const ExpertsOp& op, int64_t rows, int64_t in_width) {
  const int64_t pairs = rows * op.chosen;
  int64_t next = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = next;
    next += align_up(bytes, kCacheLine);
    return begin;
  };
  constexpr int64_t kBlock = sizeof(QuantBlock), kFour = sizeof(float);
  in_blocks = take(rows * quant_blocks(in_width) * kBlock);
  act = take(pairs * op.size * kFour);
  act_blocks = take(pairs * quant_blocks(op.size) * kBlock);
  first = take((op.experts + 1) * kFour);
  active = take((op.experts + 1) * kFour);
  tokens = take(pairs * kFour);
  weights = take(pairs * kFour);
  end_ = next;
}

int64_t ExpertsWorker::bytes(int64_t in_width, int64_t size) {
  return (2 * kResults + kDecodeTokens * std::max(in_width, size)) * int64_t{sizeof(float)};
}

Team::Part expert_rows(int64_t piece, int64_t pieces, int64_t rows) {
  const int64_t strips = (rows + kStripRows - 1) / kStripRows;
  const auto cut = [&](int64_t i) { return std::min(strips * i / pieces * kStripRows, rows); };
  return {cut(piece), cut(piece + 1)};
}

std::unique_ptr<BoundOp> bind_mixture(const RouteOp& op, const Bindings& bindings) {
  return std::make_unique<BoundRoute>(op, bindings);
}
std::unique_ptr<BoundOp> bind_mixture(const ExpertsOp& op, const Bindings& bindings) {
  return std::make_unique<BoundExperts>(op, bindings);
}

}  // namespace helm::cpu
