// How a linear op is shared by a team. The loading of weights goes by this too, so that a member
// finds what it reads in steps of few tokens in memory near it.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "helm/plan.h"

namespace helm::cpu {

// The rows of all parts, stacked.
struct LinearRows {
  int64_t rows = 0;
  int64_t row_bytes = 1;  // of the part with the widest dtype

  static LinearRows of(const Plan& plan, const LinearOp& op);

  // Rows of the pieces in which `members` share a matrix-vector product.
  int64_t decode_piece(int members) const;
  // The rows that a member reads unless others help it; see Team::parallel_for.
  Team::Part decode_part(int member, int members) const;
};

// In steps of many tokens: panels of rows with all tokens, and the last panel of each member in
// pieces of fewer tokens, so that what is left to wait for at the end is short. A kernel packs its
// inputs again for every panel of rows, which takes longer than packing rows for more pieces; so
// panels are smaller only where tokens are too few to be cut.
class PrefillPieces {
 public:
  PrefillPieces(int64_t rows, int64_t tokens, int members);

  int64_t count() const { return panels_ + shared_ * (cuts_ - 1); }

  struct Piece {
    int64_t row, end_row;
    int64_t token, end_token;
  };
  // Of a team that takes them by Team::parallel_for.
  Piece at(int64_t index) const;

 private:
  Piece cut_of(int64_t panel, int64_t cut, int64_t cuts) const;

  int64_t rows_, tokens_;
  int members_;
  int64_t panel_rows_, panels_;
  int64_t cuts_;    // of a panel that is cut
  int64_t shared_;  // panels that are
};

}  // namespace helm::cpu
