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

constexpr int64_t kMostPanelRows = 256;
constexpr int64_t kLeastPanelRows = 32;
constexpr int64_t kLeastPieceTokens = 96;
// Per member: what one waits for another at the end is at most such a part of its work.
constexpr int64_t kPrefillPieces = 4;

// Rows of a panel if each member should have so many panels at least.
int64_t panel_rows(int64_t rows, int64_t members, int64_t panels) {
  const int64_t parts = members * panels;
  return std::clamp(align_up((rows + parts - 1) / parts, kLeastPanelRows), kLeastPanelRows,
                    kMostPanelRows);
}

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

PrefillPieces::PrefillPieces(int64_t rows, int64_t tokens, int members)
    : rows_(rows), tokens_(tokens), members_(members) {
  const int64_t most_cuts = std::max<int64_t>(1, tokens / kLeastPieceTokens);
  const int64_t cuts = std::min(most_cuts, kPrefillPieces);
  panel_rows_ = panel_rows(rows, members, (kPrefillPieces + cuts - 1) / cuts);
  panels_ = (rows + panel_rows_ - 1) / panel_rows_;
  shared_ = std::min<int64_t>(panels_, members);
  cuts_ = std::min(most_cuts, (kPrefillPieces * members + shared_ - 1) / shared_);
}

PrefillPieces::Piece PrefillPieces::at(int64_t index) const {
  if (panels_ <= members_) return cut_of(index / cuts_, index % cuts_, cuts_);
  // A member's part of the pieces is its part of the panels and the further pieces of the last.
  int64_t begin = 0;
  for (int member = 0;; ++member) {
    const Team::Part own = Team::part_of(member, members_, panels_);
    const int64_t whole = own.end - own.begin - 1, end = begin + whole + cuts_;
    if (index < begin + whole) return cut_of(own.begin + index - begin, 0, 1);
    if (index < end) return cut_of(own.end - 1, index - begin - whole, cuts_);
    begin = end;
  }
}

PrefillPieces::Piece PrefillPieces::cut_of(int64_t panel, int64_t cut, int64_t cuts) const {
  return {panel * panel_rows_, std::min((panel + 1) * panel_rows_, rows_), tokens_ * cut / cuts,
          tokens_ * (cut + 1) / cuts};
}

}  // namespace helm::cpu
