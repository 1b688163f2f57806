// Where the `experts` op of a CPU stage keeps what it makes on the way. Runs nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"
#include "helm/plan.h"

namespace helm::cpu {

// Of the rows that each expert has in a matrix, the piece-th of `pieces`, by strips. Of as many
// pieces as members, what a member reads in steps of few tokens unless others help it.
Team::Part expert_rows(int64_t piece, int64_t pieces, int64_t rows);

// Shared by the members. A pair is a token and one of its experts; pairs are sorted by expert.
struct ExpertsRoom {
  ExpertsRoom(const ExpertsOp& op, int64_t rows, int64_t in_width);

  int64_t bytes() const { return end_; }

  int64_t in_blocks;   // QuantBlock [rows, quant_blocks(width(in))]
  int64_t act;         // float [pairs, size]
  int64_t act_blocks;  // QuantBlock [pairs, quant_blocks(size)]
  int64_t first;       // int32 [experts + 1], the first pair of each expert
  int64_t active;      // int32 [experts + 1], how many have a pair, then those, ascending
  int64_t tokens;      // int32 [pairs]
  int64_t weights;     // float [pairs]

 private:
  int64_t end_;
};

// Of each member beside what kernels take: results of a piece, and rows of A side by side.
struct ExpertsWorker {
  static constexpr int64_t kFewRows = 1024;  // of a piece at most, of few tokens
  static constexpr int64_t kRows = 64;       // of one of many
  static constexpr int64_t kTokens = 64;     // at once
  static constexpr int64_t kResults = int64_t{2} * 8 * kFewRows;
  static_assert(2 * kRows * kTokens <= kResults);

  static int64_t bytes(int64_t in_width, int64_t size);
};

}  // namespace helm::cpu
