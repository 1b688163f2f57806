// How the bytes of a weight slice are encoded: the names, sizes and units of all formats. Knows
// nothing of plans and kernels; helm/tiles.h says where in a packed matrix each byte lies.
#pragma once

#include <cstdint>
#include <string_view>

#include "helm/types.h"

namespace helm {

// What is stored per weight. The first four lie row by row; the others are packed: unsigned codes
// of rows side by side, with scales among them (helm/tiles.h).
enum class Codes : uint8_t { kF32, kF16, kBF16, kBF16C, kC4, kC5, kC6, kC8, kNL4, kMX4 };
inline constexpr int kCodes = 10;

// What gives the value of code u of a packed format, v(u) being u - offset or, of nl4 and mx4, a
// number of a table. Everything is converted to f32 before it is multiplied.
//   s: s v(u)      m: s u + m          z: s (u - z)     e: 2^(e - 128) v(u)
//   k: d l v(u)    km: d l u - e n     r: s v(u), with one s per row
enum class Scales : uint8_t { kNone, kS, kM, kZ, kE, kK, kKM, kR };
inline constexpr int kScales = 8;

// Columns that adjoin in all formats of packed codes: those of one int8 scale of activations.
inline constexpr int64_t kBlockCols = 32;
inline constexpr int64_t kSpanCols = 256;   // of a strip's spans but the last
inline constexpr int64_t kStripRows = 16;   // side by side
inline constexpr int64_t kFormatLine = 64;  // bytes; all parts of a packed matrix are such lines

struct Format {
  Codes codes = Codes::kF32;
  Scales scales = Scales::kNone;
  int16_t group = 0;   // columns that share a scale, 0 if none do
  int16_t offset = 0;  // what is subtracted from a code, 0 where a table gives its value
  bool wide = false;   // its 16-bit scales are bf16, not f16

  constexpr bool operator==(const Format&) const = default;
};

// The tables here are not inline: kernels of several instruction sets read them, and share nothing.

// Numbers of the codes of nl4 (llama.cpp's IQ4_NL) and of mx4 (twice FP4 E2M1).
alignas(16) constexpr int8_t kNL4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t kMX4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                               0, -1, -2, -3, -4, -6, -8, -12};

struct CodesRow {
  const char* name;
  int bits;              // per weight, without scales and escapes
  bool packed;           // in strips of kStripRows
  const int8_t* values;  // [16], by code; null: the code itself
};
// By Codes. (bf16c: 12 bits, the size is that of cpu/kernels/compressed.h.)
constexpr CodesRow kCodesRows[kCodes] = {
    {"f32", 32, false, nullptr},   {"f16", 16, false, nullptr}, {"bf16", 16, false, nullptr},
    {"bf16c", 12, false, nullptr}, {"c4", 4, true, nullptr},    {"c5", 5, true, nullptr},
    {"c6", 6, true, nullptr},      {"c8", 8, true, nullptr},    {"nl4", 4, true, kNL4Values},
    {"mx4", 4, true, kMX4Values}};

// The arrays in front of the codes of a span, one after the other, each padded to kFormatLine.
struct ScalesRow {
  const char* name;
  int group_bytes[2];  // of up to two arrays [groups, 16 rows]: bytes per element, 0: no array
  int span_f16;        // arrays f16 [16 rows], which share one line
  int strip_f32;       // arrays f32 [16 rows] at the begin of the strip, not of the span
  bool minimum;        // products add a minimum times the sum of activations
};
// By Scales.
constexpr ScalesRow kScalesRows[kScales] = {{"", {0, 0}, 0, 0, false},   // none
                                            {"s", {2, 0}, 0, 0, false},  // 16-bit s
                                            {"m", {2, 2}, 0, 0, true},   // 16-bit s; 16-bit m
                                            {"z", {2, 1}, 0, 0, true},   // 16-bit s; u8 z
                                            {"e", {1, 0}, 0, 0, false},  // u8 e
                                            {"k", {1, 0}, 1, 0, false},  // i8 l; f16 d
                                            {"km", {1, 1}, 2, 0, true},  // u8 l; u8 n; f16 d, f16 e
                                            {"r", {0, 0}, 0, 1, false}};  // f32 s

constexpr const CodesRow& row_of(Codes codes) {
  return kCodesRows[static_cast<int>(codes)];
}
constexpr const ScalesRow& row_of(Scales scales) {
  return kScalesRows[static_cast<int>(scales)];
}

// All formats. A new one is a row here and in python/helm/base/formats.py, with sizes in
// tests/data/format_bytes.json.
struct FormatRow {
  const char* name;
  Format format;
};
constexpr FormatRow kFormats[] = {
    {"f32", {Codes::kF32}},
    {"f16", {Codes::kF16}},
    {"bf16", {Codes::kBF16}},
    {"bf16c", {Codes::kBF16C}},
    {"c4.s32", {Codes::kC4, Scales::kS, 32, 8}},  // Q4_0, GPTQ, compressed-tensors
    {"c4.s64", {Codes::kC4, Scales::kS, 64, 8}},
    {"c4.s128", {Codes::kC4, Scales::kS, 128, 8}},
    {"c4.s32b", {Codes::kC4, Scales::kS, 32, 8, true}},
    {"c4.s64b", {Codes::kC4, Scales::kS, 64, 8, true}},
    {"c4.s128b", {Codes::kC4, Scales::kS, 128, 8, true}},
    {"c4.z32", {Codes::kC4, Scales::kZ, 32}},  // GPTQ, AWQ, compressed-tensors
    {"c4.z64", {Codes::kC4, Scales::kZ, 64}},
    {"c4.z128", {Codes::kC4, Scales::kZ, 128}},
    {"c4.z32b", {Codes::kC4, Scales::kZ, 32, 0, true}},
    {"c4.z64b", {Codes::kC4, Scales::kZ, 64, 0, true}},
    {"c4.z128b", {Codes::kC4, Scales::kZ, 128, 0, true}},
    {"c4.m32", {Codes::kC4, Scales::kM, 32}},       // Q4_1
    {"c4.km32", {Codes::kC4, Scales::kKM, 32}},     // Q4_K; HELM's q4
    {"c4.km16", {Codes::kC4, Scales::kKM, 16}},     // Q2_K
    {"c4.k16o4", {Codes::kC4, Scales::kK, 16, 4}},  // Q3_K
    {"c5.s32", {Codes::kC5, Scales::kS, 32, 16}},   // Q5_0
    {"c5.m32", {Codes::kC5, Scales::kM, 32}},       // Q5_1
    {"c5.km32", {Codes::kC5, Scales::kKM, 32}},     // Q5_K
    {"c6.k16", {Codes::kC6, Scales::kK, 16, 32}},   // Q6_K
    {"c8.s32", {Codes::kC8, Scales::kS, 32, 128}},  // Q8_0; HELM's q8
    {"c8.s64", {Codes::kC8, Scales::kS, 64, 128}},  // GPTQ, compressed-tensors
    {"c8.s128", {Codes::kC8, Scales::kS, 128, 128}},
    {"c8.s32b", {Codes::kC8, Scales::kS, 32, 128, true}},
    {"c8.s64b", {Codes::kC8, Scales::kS, 64, 128, true}},
    {"c8.s128b", {Codes::kC8, Scales::kS, 128, 128, true}},
    {"c8.z32", {Codes::kC8, Scales::kZ, 32}},  // GPTQ
    {"c8.z64", {Codes::kC8, Scales::kZ, 64}},
    {"c8.z128", {Codes::kC8, Scales::kZ, 128}},
    {"c8.z32b", {Codes::kC8, Scales::kZ, 32, 0, true}},
    {"c8.z64b", {Codes::kC8, Scales::kZ, 64, 0, true}},
    {"c8.z128b", {Codes::kC8, Scales::kZ, 128, 0, true}},
    {"c8.r", {Codes::kC8, Scales::kR, 0, 128}},  // int8 with a scale per row
    {"nl4.s32", {Codes::kNL4, Scales::kS, 32}},  // IQ4_NL
    {"nl4.k32", {Codes::kNL4, Scales::kK, 32}},  // IQ4_XS
    {"mx4.e32", {Codes::kMX4, Scales::kE, 32}},  // MXFP4
};

constexpr bool is_packed(const Format& format) {
  return row_of(format.codes).packed;
}
constexpr bool is_dense(const Format& format) {  // one element after the other
  return format.codes <= Codes::kBF16;
}

// Elements as they are, and back; of dense formats only.
constexpr Format format_of(DType dtype) {
  return {static_cast<Codes>(dtype)};
}
constexpr DType dtype_of(const Format& format) {
  return static_cast<DType>(format.codes);
}
static_assert(static_cast<int>(Codes::kF32) == static_cast<int>(DType::kF32) &&
              static_cast<int>(Codes::kF16) == static_cast<int>(DType::kF16) &&
              static_cast<int>(Codes::kBF16) == static_cast<int>(DType::kBF16));

// A slice, and a member's share of one, begins and ends at multiples of so many rows or columns,
// but for the end of the matrix.
constexpr int64_t row_unit(const Format& format) {
  return is_packed(format) ? kStripRows : 1;
}
constexpr int64_t col_unit(const Format& format) {
  if (is_packed(format)) return format.group > kBlockCols ? format.group : kBlockCols;
  return format.codes == Codes::kBF16C ? 128 : 1;
}

constexpr int64_t format_round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// In front of the codes of a span of `cols` columns, a multiple of col_unit.
constexpr int64_t span_header_bytes(const Format& format, int64_t cols) {
  const ScalesRow& row = row_of(format.scales);
  const int64_t groups = format.group == 0 ? 0 : cols / format.group;
  int64_t bytes = row.span_f16 > 0 ? kFormatLine : 0;
  for (const int size : row.group_bytes) {
    bytes += format_round_up(groups * kStripRows * size, kFormatLine);
  }
  return bytes;
}
// A block of kBlockCols columns of a strip takes as many lines as a code has bits.
constexpr int64_t block_bytes(const Format& format) {
  return row_of(format.codes).bits * kFormatLine;
}
constexpr int64_t span_bytes(const Format& format, int64_t cols) {
  return span_header_bytes(format, cols) + cols / kBlockCols * block_bytes(format);
}
constexpr int64_t strip_header_bytes(const Format& format) {
  return row_of(format.scales).strip_f32 * kFormatLine;
}
// 16 rows of a packed matrix of so many columns.
constexpr int64_t strip_bytes(const Format& format, int64_t cols) {
  const int64_t padded = format_round_up(cols, col_unit(format)), rest = padded % kSpanCols;
  return strip_header_bytes(format) + padded / kSpanCols * span_bytes(format, kSpanCols) +
         (rest > 0 ? span_bytes(format, rest) : 0);
}

// What a product of all rows reads of a matrix in memory.
constexpr int64_t read_bytes(const Format& format, int64_t rows, int64_t cols) {
  if (is_packed(format)) return (rows + kStripRows - 1) / kStripRows * strip_bytes(format, cols);
  if (format.codes == Codes::kBF16C) {
    const int64_t chunks = (cols + 127) / 128;  // three lines each, and eight bytes per row
    return rows * (chunks * 192 + 8);
  }
  return rows * cols * (row_of(format.codes).bits / 8);
}
// What a matrix takes in memory. Of bf16c: with the most escapes that it may have, four bytes each.
constexpr int64_t format_bytes(const Format& format, int64_t rows, int64_t cols) {
  const int64_t escapes = format.codes == Codes::kBF16C ? rows * cols / 256 + 64 : 0;
  return read_bytes(format, rows, cols) + escapes * 4;
}
// Whether a matrix of so many columns can be had in a format: an escape of bf16c has 16 bits for
// its column.
constexpr bool format_takes(const Format& format, int64_t cols) {
  return format.codes != Codes::kBF16C || cols <= 65536;
}

// "f32", "c4.km32", ...; "?" of a Format that is none of kFormats.
constexpr const char* format_name(const Format& format) {
  for (const FormatRow& row : kFormats) {
    if (row.format == format) return row.name;
  }
  return "?";
}

// Throws Error{kInvalid}, which names all formats, for any other name.
HELM_API Format format_from_name(std::string_view name);

}  // namespace helm
