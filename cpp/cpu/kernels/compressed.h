// bf16 weights in 12 bits each, exactly. The high byte of a bf16 number, its sign and seven bits of
// its exponent, takes few values among the weights of one row: eight neighbouring ones of the seven
// bits, 16 binades, hold nearly all of them. So a weight is its low byte and four bits, the sign
// and a place among the eight; the few others, the row's escapes, are kept as they are. (That
// exponents of trained weights carry 3 of their 8 bits is what DFloat11 codes by, Zhang et al.
// 2025, arXiv:2504.11651; codes of one length are read at the bandwidth of memory.)
//
// A matrix is [rows][chunks], then [rows] of CompressedRow, then its escapes. A chunk of 128
// weights takes three lines: 64 bytes of two codes each, then the 128 low bytes. Where in these a
// weight lies is up to the kernels, see Place.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helm::cpu {

inline constexpr int64_t kChunk = 128;  // weights
inline constexpr int64_t kCodeBytes = 64;
inline constexpr int64_t kChunkBytes = 192;
inline constexpr int64_t kMostCompressedCols = 65536;  // an escape has 16 bits for its column
// Of a matrix's weights so many may be escapes, and 64 more; normal numbers have one in 10,000.
inline constexpr int64_t kWeightsPerEscape = 256;

// Of a weight of a chunk: the byte that holds its code, from bit `shift` on, and its low byte.
struct Place {
  int code;
  int shift;
  int low;
};

// In vectors of so many bytes: a vector of codes belongs to two vectors of low bytes, its low
// halves to the first. `byte`: of the weight within its vector.
constexpr Place place_in_vectors(int weight, int vector, int byte) {
  const int which = weight / vector;
  return {which / 2 * vector + byte, which % 2 * 4,
          static_cast<int>(kCodeBytes) + which * vector + byte};
}
// High and low bytes of each 16 bytes interleaved, weights come in their order as words in vectors
// of 64 bytes;
constexpr Place place_of_word(int weight) {
  return place_in_vectors(weight, 64, weight % 32 / 8 * 16 + weight % 64 / 32 * 8 + weight % 8);
}
// those interleaved with zeros, as floats in vectors of so many.
template <int Lanes>
constexpr Place place_of_float(int weight) {
  const int within = weight % (4 * Lanes);
  return place_in_vectors(weight, 4 * Lanes,
                          within % Lanes / 4 * 16 + within / Lanes * 4 + within % 4);
}

// By code, what the least of a row's high bytes is to be increased by.
alignas(16) inline constexpr int8_t kHighBytes[16] = {
    0, 1, 2, 3, 4, 5, 6, 7, -128, -127, -126, -125, -124, -123, -122, -121};

struct CompressedRow {
  uint32_t first_escape;
  uint32_t base_and_escapes;  // the least of the seven bits, and << 8 the number of escapes

  uint8_t base() const { return static_cast<uint8_t>(base_and_escapes); }
  int64_t escapes() const { return base_and_escapes >> 8; }
};

struct Escape {
  uint16_t col;
  uint16_t bits;
};

constexpr int64_t compressed_row_bytes(int64_t cols) {
  return (cols + kChunk - 1) / kChunk * kChunkBytes;
}
constexpr int64_t most_escapes(int64_t rows, int64_t cols) {
  return rows * cols / kWeightsPerEscape + 64;
}

// Rows of a compressed matrix, from some row on.
struct CompressedMatrix {
  const std::byte* chunks;
  const CompressedRow* rows;
  const Escape* escapes;  // of the whole matrix
  int64_t cols;

  // Where the parts of a whole matrix begin and end.
  static constexpr int64_t rows_at(int64_t rows, int64_t cols) {
    return rows * compressed_row_bytes(cols);
  }
  static constexpr int64_t escapes_at(int64_t rows, int64_t cols) {
    return rows_at(rows, cols) + rows * static_cast<int64_t>(sizeof(CompressedRow));
  }
  static constexpr int64_t bytes(int64_t rows, int64_t cols) {
    return escapes_at(rows, cols) + most_escapes(rows, cols) * static_cast<int64_t>(sizeof(Escape));
  }
  // What a product reads of it; hardly any row has escapes.
  static constexpr int64_t read_bytes(int64_t rows, int64_t cols) { return escapes_at(rows, cols); }

  // The whole of a matrix that begins at `data`.
  static CompressedMatrix at(const std::byte* data, int64_t rows, int64_t cols) {
    return {data, reinterpret_cast<const CompressedRow*>(data + rows_at(rows, cols)),
            reinterpret_cast<const Escape*>(data + escapes_at(rows, cols)), cols};
  }
  CompressedMatrix from(int64_t row) const {
    return {chunks + row * compressed_row_bytes(cols), rows + row, escapes, cols};
  }
};

}  // namespace helm::cpu
