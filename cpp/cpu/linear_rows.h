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
