#include "cpu/linear_rows.h"

#include <algorithm>

#include "base/arena.h"

namespace helm::cpu {
namespace {

// A matrix-vector product is cut in this many pieces per member, within bounds on the weight bytes
// of a piece: each start of a piece drains the prefetch streams (pieces of 64 KiB cost a fifth of
// the bandwidth of pieces of 512 KiB on two Zen 4 cores), while few pieces leave members idle at
// the end.
constexpr int64_t kDecodePieces = 4;
constexpr int64_t kDecodePieceLeastBytes = int64_t{64} << 10;
constexpr int64_t kDecodePieceMostBytes = int64_t{1} << 20;

}  // namespace

LinearRows LinearRows::of(const Plan& plan, const LinearOp& op) {
  LinearRows all;
  const int64_t cols = plan.values[static_cast<size_t>(op.in)].width;
  for (const LinearOp::Part& part : op.parts) {
    const TensorSpec& spec = plan.tensors[static_cast<size_t>(part.weight)];
    all.rows += spec.shape[0];
    all.row_bytes = std::max(all.row_bytes, cols * dtype_bytes(spec.dtype));
  }
  return all;
}

int64_t LinearRows::decode_piece(int members) const {
  const int64_t bytes = std::clamp(rows * row_bytes / (kDecodePieces * members),
                                   kDecodePieceLeastBytes, kDecodePieceMostBytes);
  return std::max<int64_t>(8, align_up(bytes / row_bytes, 8));
}

Team::Part LinearRows::decode_part(int member, int members) const {
  const int64_t piece = decode_piece(members);
  const Team::Part pieces = Team::part_of(member, members, (rows + piece - 1) / piece);
  return {std::min(pieces.begin * piece, rows), std::min(pieces.end * piece, rows)};
}

}  // namespace helm::cpu
