// A rectangle of a matrix that a checkpoint stores as a whole.
#pragma once

#include <cstdint>
#include <string>

#include "weights/stored_matrix.h"

namespace helm {

// Rows and columns of `whole` from these on; the whole must outlive the part. The first column is a
// multiple of kSpanCols, and so is the number of columns but at the end. Throws Error{kInvalid} for
// some of the columns where packed formats would have the whole's in another order.
class MatrixPart final : public StoredMatrix {
 public:
  MatrixPart(const StoredMatrix& whole, std::string name, int64_t rows, int64_t cols, int64_t row,
             int64_t col);

  void read_row(int64_t row, float* out) const override;
  void unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const override;
  std::vector<int32_t> column_order() const override { return whole_.column_order(); }

 private:
  const StoredMatrix& whole_;
  int64_t row_, col_;  // the first ones
};

}  // namespace helm
