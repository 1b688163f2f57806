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

constexpr int64_t kPanelRows = 256;
constexpr int64_t kLeastPieceRows = 32;
// Per panel and member: what one waits for another at the end is at most such a part of them.
constexpr int64_t kPrefillPieces = 4;

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

PrefillPieces::PrefillPieces(int64_t rows, int members) : rows_(rows), members_(members) {
  panel_rows_ = kPanelRows;
  panels_ = (rows + panel_rows_ - 1) / panel_rows_;
  cuts_ = kPrefillPieces;
  if (panels_ >= members) return;
  const int64_t parts = members * kPrefillPieces;
  panel_rows_ = align_up((rows + parts - 1) / parts, kLeastPieceRows);
  panels_ = (rows + panel_rows_ - 1) / panel_rows_;
  cuts_ = 1;
}

PrefillPieces::Piece PrefillPieces::at(int64_t index) const {
  const auto piece = [&](int64_t row, int64_t rows) {
    return Piece{std::min(row, rows_), std::min(row + rows, rows_)};
  };
  if (cuts_ == 1) return piece(index * panel_rows_, panel_rows_);
  // A member's part of the pieces is its part of the panels and the further pieces of the last.
  int64_t begin = 0;
  for (int member = 0;; ++member) {
    const Team::Part own = Team::part_of(member, members_, panels_);
    const int64_t whole = own.end - own.begin - 1, end = begin + whole + cuts_;
    if (index < begin + whole) return piece((own.begin + index - begin) * panel_rows_, panel_rows_);
    if (index < end) {
      const int64_t rows = panel_rows_ / cuts_;
      return piece((own.end - 1) * panel_rows_ + (index - begin - whole) * rows, rows);
    }
    begin = end;
  }
}

}  // namespace helm::cpu
