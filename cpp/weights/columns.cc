// Dense matrices that a checkpoint has column by column, as their layers multiply from the left.
#include <algorithm>

#include "weights/pieces.h"

namespace helm {
namespace {

// weight [cols, rows] in f32, f16 or bf16.
class ColumnsMatrix final : public StoredMatrix {
 public:
  explicit ColumnsMatrix(const StoredWeights& weights)
      : ColumnsMatrix(weights, FloatPiece(piece_of(weights, "weight", {"f32", "f16", "bf16"},
                                                   weights.cols, weights.rows))) {}

  void read_row(int64_t row, float* out) const override {
    for (int64_t col = 0; col < cols(); col += kSpanCols) {
      bool good = true;
      for (int64_t k = col; k < std::min(col + kSpanCols, cols()); ++k) {
        out[k] = weight_.at(k * rows() + row);
        good &= out[k] - out[k] == 0;
      }
      if (!good) refuse(row, col);
    }
  }

 private:
  ColumnsMatrix(const StoredWeights& weights, const FloatPiece& weight)
      : StoredMatrix(weights.name, weights.rows, weights.cols, format_of(weight.dtype)),
        weight_(weight) {}

  FloatPiece weight_;
};

}  // namespace

std::unique_ptr<StoredMatrix> open_columns(const StoredWeights& weights) {
  return std::make_unique<ColumnsMatrix>(weights);
}

}  // namespace helm
