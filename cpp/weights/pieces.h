// Matrices that a checkpoint stores as several tensors, its pieces: integers, scales, zero points,
// an order. One class per kind of checkpoint. Knows memory, no files and no plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "helm/encode.h"
#include "weights/stored_matrix.h"

namespace helm {

// A kind's name in plans, and what makes a matrix of its pieces. Reads their memory, which must
// outlive the matrix. Throws Error{kInvalid}, which names the piece, where one is absent, has
// another shape or dtype, or does not fit the others.
struct PiecesKind {
  const char* stored;
  std::unique_ptr<StoredMatrix> (*open)(const StoredWeights& weights);
};
std::span<const PiecesKind> pieces_kinds();
// Of weights whose `stored` is one of these.
std::unique_ptr<StoredMatrix> open_pieces(const StoredWeights& weights);

// A piece that must be there, [rows, cols], of one of the dtypes; another number of columns or rows
// is refused where `rows` or `cols` is not kAny.
inline constexpr int64_t kAny = -1;
const StoredPiece& piece_of(const StoredWeights& weights, const char* name,
                            std::initializer_list<std::string_view> dtypes, int64_t rows,
                            int64_t cols);
const StoredPiece* find_piece(const StoredWeights& weights, const char* name);

// i32 [cols], the group of each column, or null.
const StoredPiece* find_order(const StoredWeights& weights, const char* name);

// Scales as checkpoints have them: f16, bf16 or f32.
struct FloatPiece {
  explicit FloatPiece(const StoredPiece& piece);
  float at(int64_t index) const;
  uint16_t bits(int64_t index) const;  // of f16 or bf16

  const std::byte* data;
  DType dtype;
};
// Whether a piece is one such number.
bool is_one_float(const StoredPiece* piece);

// Four-bit codes one after the other, the first in the low bits: n of them, a multiple of 8.
void spread_nibbles(const std::byte* from, int64_t n, uint8_t* code);

// How many columns share a scale in a packed format, for `stored` columns per scale of the
// checkpoint: 128, 64 or 32, which divides `stored`; 0 where none does.
constexpr int group_for(int64_t stored) {
  return stored % 128 == 0 ? 128 : stored % 64 == 0 ? 64 : stored % 32 == 0 ? 32 : 0;
}

std::unique_ptr<StoredMatrix> open_gptq4(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_gptq4_v2(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_gptq8(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_gptq8_v2(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_awq4(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_ct4(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_ct8(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_f8e4m3(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_mx4(const StoredWeights& weights);
std::unique_ptr<StoredMatrix> open_columns(const StoredWeights& weights);

}  // namespace helm
