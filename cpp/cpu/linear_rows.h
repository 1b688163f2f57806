// How a linear op is shared by a team. The loading of weights goes by this too, so that a member
// finds what it reads in steps of few tokens in memory near it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "helm/plan.h"

namespace helm::cpu {

// The rows of all parts, stacked. Parts are cut at multiples of their row unit.
struct LinearRows {
  std::vector<int64_t> first_row;  // of each part, and behind the last
  std::vector<int64_t> row_unit;   // of each part's format
  int64_t row_bytes = 1;           // that a product reads, of the part with the widest format

  // format(tensor): that of a part's weights.
  template <typename FormatOf>
  static LinearRows of(const Plan& plan, const LinearOp& op, const FormatOf& format) {
    LinearRows all;
    all.first_row.push_back(0);
    for (const LinearOp::Part& part : op.parts) {
      all.add(plan.tensors[static_cast<size_t>(part.weight)], format(part.weight));
    }
    return all;
  }

  int64_t rows() const { return first_row.back(); }
  // Of the stacked rows [begin, end), those that lie in a part, as rows of it. Stretches that
  // adjoin give rows that adjoin.
  Team::Part rows_of(size_t part, int64_t begin, int64_t end) const;
  // The rows of a part that a member reads in steps of few tokens unless others help it.
  Team::Part decode_part(int member, int members, size_t part) const;

 private:
  void add(const TensorSpec& weight, const Format& format);
};

// A piece of a matrix-vector product: a slice (see MatmulArgs) of some rows of one part.
struct DecodePiece {
  size_t part = 0;
  int64_t first_row = 0;  // of the part
  int64_t rows = 0;       // none: nothing to do
  int64_t slice = 0;
  int64_t slices = 1;
};
// As many for each member, one member's after the other's: what its decode_part has of each part.
std::vector<DecodePiece> decode_pieces(const LinearRows& all, int members);

// In steps of many tokens: panels of rows, and the last panel of each member in smaller pieces, so
// that what is left to wait for at the end is short.
class PrefillPieces {
 public:
  PrefillPieces(int64_t rows, int members);

  int64_t count() const { return panels_ + members_ * (cuts_ - 1); }

  struct Piece {
    int64_t row, end_row;
  };
  // Of a team that takes them by Team::parallel_for.
  Piece at(int64_t index) const;

 private:
  int64_t rows_;
  int members_;
  int64_t panel_rows_, panels_;
  int64_t cuts_;  // of a member's last panel
};

}  // namespace helm::cpu
