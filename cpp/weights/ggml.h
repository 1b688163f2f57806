// Matrices as GGML stores them: each type's blocks, and the packed format that holds the same
// values to the bit. Knows rows in memory, no files and no plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "helm/stored.h"
#include "weights/stored_matrix.h"

namespace helm {

// Rows in memory, so many bytes apart. A matrix may consist of several: experts that are stacked,
// rows that another order has.
struct RowRun {
  const std::byte* first;
  int64_t rows;
  int64_t stride;  // bytes
};

// Reads the memory of its rows, which must outlive it.
class GgmlMatrix : public StoredMatrix {
 public:
  // Codes and scales of n columns, whole blocks and at most a span.
  using Unpack = void (*)(const std::byte* blocks, int64_t n, SpanRow& row);

  // cols: a multiple of the encoding's block_cols.
  GgmlMatrix(std::string name, Stored stored, std::vector<RowRun> runs, int64_t cols,
             int64_t first_row = 0);

  void read_row(int64_t row, float* out) const override;
  void unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const override;

 private:
  const std::byte* row_at(int64_t row) const;

  Stored stored_;
  Unpack unpack_;  // null of dense encodings
  std::vector<RowRun> runs_;
  std::vector<int64_t> begins_;  // by run: its first row
};

}  // namespace helm
