// Integers with a scale and a zero point per row and group of columns:
//   value(r, k) = scale(r, g) * (code(r, k) - zero(r, g)),  g = group_of(k)
#pragma once

#include <cstdint>
#include <vector>

#include "weights/pieces.h"

namespace helm {

class IntegerMatrix : public StoredMatrix {
 public:
  void read_row(int64_t row, float* out) const override;
  void unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const override;
  std::vector<int32_t> column_order() const override { return order_; }

 protected:
  // How scales lie: that of row r and group g is element r * row_stride + g * group_stride.
  struct Scaling {
    FloatPiece scales;
    int64_t groups;
    int64_t row_stride;
    int64_t group_stride;
  };
  // bits: of a code, 4 or 8. centred: all zero points are 2^(bits - 1). group_of_col: i32 [cols],
  // or null where columns of a group adjoin.
  IntegerMatrix(const StoredWeights& weights, int bits, bool centred, const Scaling& scaling,
                const StoredPiece* group_of_col);

  // Codes of `count` <= 16 rows: of columns [col, col + n) where `which` is null, else of columns
  // which[0] to which[n - 1].
  virtual void read_codes(int64_t row, int count, int64_t col, int64_t n, const int32_t* which,
                          SpanRow* to) const = 0;
  virtual int zero(int64_t row, int64_t group) const = 0;

 private:
  static Format exact_of(const StoredWeights& weights, int bits, bool centred,
                         const Scaling& scaling, bool mixed);
  int64_t group_of(int64_t col) const;
  void sort_columns();

  Scaling scaling_;
  int64_t group_;                  // columns per scale
  std::vector<int32_t> group_of_;  // by column; empty where columns of a group adjoin
  std::vector<int32_t> order_;     // of unpack(); empty: as they are
};

}  // namespace helm
