// compressed-tensors' integers: "pack-quantized" and "int-quantized", row by row.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "weights/integer_matrix.h"

namespace helm {
namespace {

// Of [rows, groups], or of one for all.
struct Scales2d {
  const StoredPiece& piece;
  int64_t groups;
  bool whole;  // one for all
};

Scales2d scales_2d_of(const StoredWeights& weights) {
  const StoredPiece* piece = find_piece(weights, "weight_scale");
  if (is_one_float(piece)) return {*piece, 1, true};
  const StoredPiece& found =
      piece_of(weights, "weight_scale", {"f16", "bf16", "f32"}, weights.rows, kAny);
  return {found, found.shape[1], false};
}

// Codes in rows, packed into words of 32 bits or bytes with a sign; stored with 2^(bits - 1) added,
// or so understood. Zero points, where there are any, likewise.
class CompressedTensorsMatrix final : public IntegerMatrix {
 public:
  CompressedTensorsMatrix(const StoredWeights& weights, int bits, const Scales2d& scales)
      : IntegerMatrix(
            weights, bits, find_piece(weights, "weight_zero_point") == nullptr,
            {FloatPiece(scales.piece), scales.groups, scales.whole ? 0 : scales.groups, 1},
            find_order(weights, "weight_g_idx")),
        bits_(bits),
        groups_(scales.groups),
        packed_(find_piece(weights, "weight_packed") != nullptr) {
    const int64_t per_word = 32 / bits;
    const auto words = [&](int64_t n) { return (n + per_word - 1) / per_word; };
    row_bytes_ = packed_ ? words(weights.cols) * 4 : weights.cols;
    weight_ = packed_ ? &piece_of(weights, "weight_packed", {"i32"}, weights.rows, row_bytes_ / 4)
                      : &piece_of(weights, "weight", {"i8"}, weights.rows, weights.cols);
    if (find_piece(weights, "weight_zero_point") == nullptr) return;
    zeros_ = packed_
                 ? &piece_of(weights, "weight_zero_point", {"i32"}, words(weights.rows), groups_)
                 : &piece_of(weights, "weight_zero_point", {"i8"}, weights.rows, groups_);
  }

 private:
  void read_codes(int64_t row, int count, int64_t col, int64_t n, const int32_t* which,
                  SpanRow* to) const override {
    for (int r = 0; r < count; ++r) {
      const std::byte* from = weight_->bytes.data() + (row + r) * row_bytes_;
      uint8_t* code = to[r].code;
      if (which != nullptr) {
        for (int64_t j = 0; j < n; ++j) code[j] = code_at(from, which[j]);
      } else if (bits_ == 4) {
        const int64_t whole = n / 8 * 8;
        spread_nibbles(from + col / 2, whole, code);
        for (int64_t j = whole; j < n; ++j) code[j] = code_at(from, col + j);
      } else {
        std::memcpy(code, from + col, static_cast<size_t>(n));
        for (int64_t j = 0; j < n; ++j) code[j] = static_cast<uint8_t>(code[j] ^ flip());
      }
    }
  }

  uint8_t code_at(const std::byte* row, int64_t k) const {
    if (bits_ == 8) return static_cast<uint8_t>(static_cast<uint8_t>(row[k]) ^ flip());
    return static_cast<uint8_t>(static_cast<uint8_t>(row[k / 2]) >> k % 2 * 4 & 15);
  }
  // From a sign to an offset of 128; packed codes have the offset already.
  uint8_t flip() const { return packed_ ? 0 : 0x80; }

  int zero(int64_t row, int64_t group) const override {
    if (zeros_ == nullptr) return 1 << (bits_ - 1);
    const auto* bytes = reinterpret_cast<const uint8_t*>(zeros_->bytes.data());
    if (!packed_) return bytes[row * groups_ + group] ^ 0x80;
    const int64_t per_word = 32 / bits_;
    uint32_t word;
    std::memcpy(&word, bytes + (row / per_word * groups_ + group) * 4, sizeof word);
    return static_cast<int>(word >> row % per_word * bits_ & ((1u << bits_) - 1));
  }

  int bits_;
  int64_t groups_;
  bool packed_;
  int64_t row_bytes_;
  const StoredPiece* weight_;
  const StoredPiece* zeros_ = nullptr;  // null: all in the middle
};

}  // namespace

std::unique_ptr<StoredMatrix> open_ct4(const StoredWeights& weights) {
  piece_of(weights, "weight_packed", {"i32"}, weights.rows, kAny);
  return std::make_unique<CompressedTensorsMatrix>(weights, 4, scales_2d_of(weights));
}
std::unique_ptr<StoredMatrix> open_ct8(const StoredWeights& weights) {
  return std::make_unique<CompressedTensorsMatrix>(weights, 8, scales_2d_of(weights));
}

}  // namespace helm
