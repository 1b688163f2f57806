// GPTQ and AWQ: integers by column first, as their layers multiply from the left.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "weights/integer_matrix.h"

namespace helm {
namespace {

uint32_t word_at(const StoredPiece& piece, int64_t index) {
  uint32_t word;
  std::memcpy(&word, piece.bytes.data() + index * 4, sizeof word);
  return word;
}

const StoredPiece& scales_of(const StoredWeights& weights) {
  return piece_of(weights, "scales", {"f16", "bf16", "f32"}, kAny, weights.rows);
}

// Packed along the rows or along the columns of the matrix, whose sizes fill words.
void check_words(const StoredWeights& weights, const char* what, int64_t size, int64_t per_word) {
  if (size % per_word == 0) return;
  fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has ", size, " ", what,
       ", expected a multiple of ", per_word, " in ", weights.stored);
}

// qweight i32 [cols / p, rows]: code i of word (j, r) is column p j + i of row r, p codes a word.
// qzeros i32 [groups, rows / p]: code i of word (g, j) is the zero point of row p j + i, less
// `one`.
class GptqMatrix final : public IntegerMatrix {
 public:
  GptqMatrix(const StoredWeights& weights, int bits, int one)
      : IntegerMatrix(
            weights, bits, false,
            {FloatPiece(scales_of(weights)), scales_of(weights).shape[0], 1, weights.rows},
            find_order(weights, "g_idx")),
        bits_(bits),
        per_word_(32 / bits),
        one_(one),
        weight_(piece_of(weights, "qweight", {"i32"}, weights.cols / per_word_, weights.rows)),
        zeros_(piece_of(weights, "qzeros", {"i32"}, scales_of(weights).shape[0],
                        weights.rows / per_word_)) {
    check_words(weights, "columns", weights.cols, per_word_);
    check_words(weights, "rows", weights.rows, per_word_);
  }

 private:
  void read_codes(int64_t row, int count, int64_t col, int64_t n, const int32_t* which,
                  SpanRow* to) const override {
    if (which == nullptr) return read_words(row, count, col, n, to);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = which[j] / per_word_ * rows() + row;
      const int shift = static_cast<int>(which[j] % per_word_) * bits_;
      for (int r = 0; r < count; ++r) {
        to[r].code[j] = static_cast<uint8_t>(word_at(weight_, at + r) >> shift & mask());
      }
    }
  }

  // Whole words: spans begin and end at them.
  void read_words(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const {
    for (int64_t j = 0; j < n; j += per_word_) {
      const std::byte* from = weight_.bytes.data() + ((col + j) / per_word_ * rows() + row) * 4;
      for (int r = 0; r < count; ++r) {
        if (bits_ == 4) {
          spread_nibbles(from + 4 * r, 8, to[r].code + j);
        } else {
          std::memcpy(to[r].code + j, from + 4 * r, 4);
        }
      }
    }
  }

  int zero(int64_t row, int64_t group) const override {
    const uint32_t word = word_at(zeros_, group * (rows() / per_word_) + row / per_word_);
    return static_cast<int>(word >> row % per_word_ * bits_ & mask()) + one_;
  }

  uint32_t mask() const { return (1u << bits_) - 1; }

  int bits_;
  int64_t per_word_;
  int one_;
  const StoredPiece& weight_;
  const StoredPiece& zeros_;
};

// Nibble i of a word is row 8 j + kAwqOrder[i].
constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// qweight i32 [cols, rows / 8], qzeros i32 [groups, rows / 8].
class AwqMatrix final : public IntegerMatrix {
 public:
  explicit AwqMatrix(const StoredWeights& weights)
      : IntegerMatrix(
            weights, 4, false,
            {FloatPiece(scales_of(weights)), scales_of(weights).shape[0], 1, weights.rows},
            nullptr),
        weight_(piece_of(weights, "qweight", {"i32"}, weights.cols, weights.rows / 8)),
        zeros_(
            piece_of(weights, "qzeros", {"i32"}, scales_of(weights).shape[0], weights.rows / 8)) {
    check_words(weights, "rows", weights.rows, 8);
    for (int i = 0; i < 8; ++i) shift_of_[kAwqOrder[i]] = 4 * i;
  }

 private:
  void read_codes(int64_t row, int count, int64_t col, int64_t n, const int32_t*,
                  SpanRow* to) const override {
    for (int64_t k = 0; k < n; ++k) {
      const int64_t at = (col + k) * (rows() / 8);
      for (int r = 0; r < count; ++r) {
        const uint32_t word = word_at(weight_, at + (row + r) / 8);
        to[r].code[k] = static_cast<uint8_t>(word >> shift_of_[(row + r) % 8] & 15);
      }
    }
  }

  int zero(int64_t row, int64_t group) const override {
    const uint32_t word = word_at(zeros_, group * (rows() / 8) + row / 8);
    return static_cast<int>(word >> shift_of_[row % 8] & 15);
  }

  const StoredPiece& weight_;
  const StoredPiece& zeros_;
  int shift_of_[8];
};

}  // namespace

std::unique_ptr<StoredMatrix> open_gptq4(const StoredWeights& weights) {
  return std::make_unique<GptqMatrix>(weights, 4, 1);
}
std::unique_ptr<StoredMatrix> open_gptq4_v2(const StoredWeights& weights) {
  return std::make_unique<GptqMatrix>(weights, 4, 0);
}
std::unique_ptr<StoredMatrix> open_gptq8(const StoredWeights& weights) {
  return std::make_unique<GptqMatrix>(weights, 8, 1);
}
std::unique_ptr<StoredMatrix> open_gptq8_v2(const StoredWeights& weights) {
  return std::make_unique<GptqMatrix>(weights, 8, 0);
}
std::unique_ptr<StoredMatrix> open_awq4(const StoredWeights& weights) {
  return std::make_unique<AwqMatrix>(weights);
}

}  // namespace helm
