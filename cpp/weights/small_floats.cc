// Weights in 8 and 4 bit floats: FP8 E4M3 with f32 scales, and gpt-oss's MXFP4.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "weights/pieces.h"

namespace helm {
namespace {

constexpr int64_t kScaleBlock = 128;  // rows and columns that share a scale of FP8

// Of sign, four bits of exponent, three of fraction; no infinities, all ones are NaN.
constexpr float value_of_f8e4m3(int bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float value = static_cast<float>(exponent == 0 ? fraction : 8 + fraction) / 512.0f;
  for (int e = 1; e < exponent; ++e) value *= 2;
  if ((bits & 127) == 127) value = __builtin_nanf("");
  return bits >= 128 ? -value : value;
}
constexpr std::array<float, 256> kF8E4M3 = [] {
  std::array<float, 256> values{};
  for (int i = 0; i < 256; ++i) values[static_cast<size_t>(i)] = value_of_f8e4m3(i);
  return values;
}();

// value(r, k) = f32(w(r, k)) * f32(scale), rounded to f32. The scale is one for all, one per row,
// or one per 128 x 128 weights.
class F8Matrix final : public StoredMatrix {
 public:
  explicit F8Matrix(const StoredWeights& weights)
      : StoredMatrix(weights.name, weights.rows, weights.cols, format_of(DType::kF32)),
        weight_(piece_of(weights, "weight", {"f8e4m3"}, weights.rows, weights.cols)) {
    const char* inverse = "weight_scale_inv";
    const char* what = find_piece(weights, inverse) != nullptr ? inverse : "weight_scale";
    const StoredPiece* scale = find_piece(weights, what);
    if (is_one_float(scale)) {
      scale_ = FloatPiece(*scale);
      return;
    }
    const bool blocks = scale != nullptr && scale->shape.size() == 2 &&
                        !(scale->shape[0] == weights.rows && scale->shape[1] == 1);
    const auto count = [](int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; };
    const StoredPiece& found =
        piece_of(weights, what, {"f32", "f16", "bf16"}, blocks ? count(weights.rows) : weights.rows,
                 blocks ? count(weights.cols) : 1);
    scale_ = FloatPiece(found);
    rows_per_scale_ = blocks ? kScaleBlock : 1;
    row_stride_ = found.shape[1];
    col_stride_ = blocks ? 1 : 0;
  }

  void read_row(int64_t row, float* out) const override {
    const auto* from = reinterpret_cast<const uint8_t*>(weight_.bytes.data()) + row * cols();
    const int64_t at = row / rows_per_scale_ * row_stride_;
    for (int64_t col = 0; col < cols(); col += kScaleBlock) {
      const float scale = scale_->at(at + col / kScaleBlock * col_stride_);
      bool good = true;
      for (int64_t k = col; k < std::min(col + kScaleBlock, cols()); ++k) {
        out[k] = kF8E4M3[from[k]] * scale;
        good &= out[k] - out[k] == 0;
      }
      if (!good) refuse(row, col / kSpanCols * kSpanCols);
    }
  }

 private:
  const StoredPiece& weight_;
  std::optional<FloatPiece> scale_;
  int64_t rows_per_scale_ = 1;
  int64_t row_stride_ = 0;  // elements
  int64_t col_stride_ = 0;
};

// blocks u8 [rows, cols / 2]: elements 2 j, in the low half, and 2 j + 1 of byte j. scales u8
// [rows, cols / 32], E8M0. value = 2^(scale - 127) E2M1 = 2^(scale - 128) kMX4Values.
class Mx4Matrix final : public StoredMatrix {
 public:
  explicit Mx4Matrix(const StoredWeights& weights)
      : StoredMatrix(weights.name, weights.rows, weights.cols,
                     {Codes::kMX4, Scales::kE, static_cast<int16_t>(kBlockCols)}),
        blocks_(piece_of(weights, "blocks", {"u8"}, weights.rows, weights.cols / 2)),
        scales_(piece_of(weights, "scales", {"u8"}, weights.rows, weights.cols / kBlockCols)) {
    if (weights.cols % kBlockCols == 0) return;
    fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has ", weights.cols,
         " columns, expected a multiple of ", kBlockCols, " in ", weights.stored);
  }

  void unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const override {
    for (int r = 0; r < count; ++r) {
      spread_nibbles(blocks_.bytes.data() + ((row + r) * cols() + col) / 2, n, to[r].code);
      const std::byte* scales = scales_.bytes.data() + ((row + r) * cols() + col) / kBlockCols;
      std::memcpy(to[r].l, scales, static_cast<size_t>(n / kBlockCols));
    }
  }

 private:
  const StoredPiece& blocks_;
  const StoredPiece& scales_;
};

}  // namespace

std::unique_ptr<StoredMatrix> open_f8e4m3(const StoredWeights& weights) {
  return std::make_unique<F8Matrix>(weights);
}
std::unique_ptr<StoredMatrix> open_mx4(const StoredWeights& weights) {
  return std::make_unique<Mx4Matrix>(weights);
}

}  // namespace helm
