// How a linear op's weight rows are shared by a team in steps of few tokens. Both the op and the
// loading of its weights go by this, so that a member finds what it reads in memory near it.
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

}  // namespace helm::cpu
