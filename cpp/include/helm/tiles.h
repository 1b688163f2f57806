// Where each byte of a packed matrix lies (helm/format.h has the sizes). The same bytes serve every
// device: lines are operands of vpdpbusd, of AVX2's two halves and of CUDA's __dp4a.
//
//   matrix  strips of 16 rows, one after the other; rows beyond the last have scales 0
//   strip   [f32 s[16], of r], then spans of 256 columns, the last one of what is left, rounded up
//           to col_unit; columns beyond the last have any code: activations are 0 there
//   span    header, then blocks of 32 columns
//   header  arrays, each padded to 64 bytes, little endian: up to two [group][16 rows] and then one
//           line of f16 [16] arrays, in the order of ScalesRow
//   block   code lines of 64 bytes, as many as a code has bits:
//     c8           line q, byte 4 r + b: row r, column 4 q + b                            (q < 8)
//     c4 nl4 mx4   line i, byte 4 r + b: low half column 4 i + b, high half 16 + 4 i + b  (i < 4)
//     c5           as c4, then a line: bit t of byte 4 r + b is bit 4 of column 4 t + b   (t < 8)
//     c6           as c4, then two lines p: bits 2 t and 2 t + 1 of byte 4 r + b are bits 4 and 5
//                  of column 16 p + 4 t + b                                               (t < 4)
#pragma once

#include <cstdint>

#include "helm/format.h"

namespace helm {

// A matrix of `cols` columns is encoded in so many.
constexpr int64_t padded_cols(const Format& format, int64_t cols) {
  return format_round_up(cols, col_unit(format));
}
// Columns of the span that begins at column k, a multiple of kSpanCols.
constexpr int64_t span_cols(const Format& format, int64_t cols, int64_t k) {
  const int64_t left = padded_cols(format, cols) - k;
  return left < kSpanCols ? left : kSpanCols;
}

// Bytes from the begin of the matrix to a strip, and from that of a strip to the span of column k.
constexpr int64_t strip_at(const Format& format, int64_t cols, int64_t strip) {
  return strip * strip_bytes(format, cols);
}
constexpr int64_t span_at(const Format& format, int64_t k) {
  return strip_header_bytes(format) + k / kSpanCols * span_bytes(format, kSpanCols);
}

// Bytes from the begin of a span of n columns to an array [n / group][16] of its header, the first
// (s, e, l) or the second (m, z, n);
constexpr int64_t group_array_at(const Format& format, int64_t n, int which) {
  if (which == 0) return 0;
  return format_round_up(n / format.group * kStripRows * row_of(format.scales).group_bytes[0],
                         kFormatLine);
}
// to an array f16 [16], the first (d) or the second (e);
constexpr int64_t span_array_at(const Format& format, int64_t n, int which) {
  return span_header_bytes(format, n) - kFormatLine + which * kStripRows * 2;
}
// and to the block of column k of the span.
constexpr int64_t block_at(const Format& format, int64_t n, int64_t k) {
  return span_header_bytes(format, n) + k / kBlockCols * block_bytes(format);
}

// Where in a block some bits of a code lie: `count` bits of byte `byte`, from bit `shift` on.
struct CodeBits {
  int byte;
  int shift;
  int count;
};
// The low bits of the code of row r < 16 and column k < 32: four, or all eight of c8;
constexpr CodeBits low_bits(Codes codes, int r, int k) {
  const int within = 4 * r + k % 4;
  if (codes == Codes::kC8) return {k / 4 * 64 + within, 0, 8};
  return {k % 16 / 4 * 64 + within, k / 16 * 4, 4};
}
// and the bits above these, none but of c5 and c6.
constexpr CodeBits plane_bits(Codes codes, int r, int k) {
  const int within = 4 * r + k % 4;
  if (codes == Codes::kC5) return {256 + within, k / 4, 1};
  if (codes == Codes::kC6) return {256 + k / 16 * 64 + within, k % 16 / 4 * 2, 2};
  return {0, 0, 0};
}

// The code of row r and column k of a block, and its writing into a block of zeros.
inline int read_code(Codes codes, const uint8_t* block, int r, int k) {
  const CodeBits low = low_bits(codes, r, k), plane = plane_bits(codes, r, k);
  const int above = block[plane.byte] >> plane.shift & ((1 << plane.count) - 1);
  return (block[low.byte] >> low.shift & ((1 << low.count) - 1)) | above << low.count;
}
inline void write_code(Codes codes, uint8_t* block, int r, int k, int code) {
  const CodeBits low = low_bits(codes, r, k), plane = plane_bits(codes, r, k);
  const auto put = [block](const CodeBits& bits, int value) {
    const int kept = value & ((1 << bits.count) - 1);
    block[bits.byte] = static_cast<uint8_t>(block[bits.byte] | kept << bits.shift);
  };
  put(low, code);
  put(plane, code >> low.count);
}

}  // namespace helm
