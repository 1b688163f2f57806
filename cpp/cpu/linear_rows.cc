#include "cpu/linear_rows.h"

#include <algorithm>

#include "base/arena.h"

namespace helm::cpu {
namespace {

// Of each member's rows of a matrix-vector product, within bounds on a piece's weights. The more,
// the shorter members wait for each other at the end; but some kernels pack their tokens for each.
constexpr int64_t kDecodePieces = 8;
constexpr int64_t kDecodePieceLeastBytes = int64_t{64} << 10;
constexpr int64_t kDecodePieceMostBytes = int64_t{512} << 10;
// Members begin with a multiple of this, so that they write to different cache lines.
constexpr int64_t kDecodeRows = 16;

constexpr int64_t kPanelRows = 256;
constexpr int64_t kLeastPieceRows = 32;
// Per panel and member: what one waits for another at the end is at most such a part of them.
constexpr int64_t kPrefillPieces = 4;

}  // namespace

void LinearRows::add(const TensorSpec& weight, const Format& format) {
  const int64_t unit = helm::row_unit(format);
  first_row.push_back(rows() + weight.rows());
  row_unit.push_back(unit);
  row_bytes = std::max(row_bytes, read_bytes(format, unit, weight.cols()) / unit);
}

Team::Part LinearRows::rows_of(size_t part, int64_t begin, int64_t end) const {
  const int64_t first = first_row[part], rows = first_row[part + 1] - first;
  const auto cut = [&](int64_t stacked) {
    return std::min(align_up(std::clamp<int64_t>(stacked - first, 0, rows), row_unit[part]), rows);
  };
  return {cut(begin), cut(end)};
}

Team::Part LinearRows::decode_part(int member, int members, size_t part) const {
  const int64_t groups = (rows() + kDecodeRows - 1) / kDecodeRows;
  const auto [begin, end] = Team::part_of(member, members, groups);
  return rows_of(part, begin * kDecodeRows, end * kDecodeRows);
}

std::vector<DecodePiece> decode_pieces(const LinearRows& all, int members) {
  const int64_t piece_bytes = std::clamp(all.rows() * all.row_bytes / (kDecodePieces * members),
                                         kDecodePieceLeastBytes, kDecodePieceMostBytes);
  std::vector<std::vector<DecodePiece>> of(static_cast<size_t>(members));
  size_t most = 0;
  for (int member = 0; member < members; ++member) {
    std::vector<DecodePiece>& own = of[static_cast<size_t>(member)];
    for (size_t part = 0; part + 1 < all.first_row.size(); ++part) {
      const auto [begin, end] = all.decode_part(member, members, part);
      if (begin == end) continue;
      const int64_t slices = std::max<int64_t>(1, (end - begin) * all.row_bytes / piece_bytes);
      for (int64_t slice = 0; slice < slices; ++slice) {
        own.push_back({part, begin, end - begin, slice, slices});
      }
    }
    most = std::max(most, own.size());
  }
  std::vector<DecodePiece> pieces;
  for (std::vector<DecodePiece>& own : of) {
    own.resize(most);
    pieces.insert(pieces.end(), own.begin(), own.end());
  }
  return pieces;
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
