// How files store the elements of weights. Header only. Each reader of a kind of files adds rows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "helm/format.h"
#include "helm/types.h"

namespace helm {

// The first ones are elements of that dtype, one after the other; then come GGML's blocks
// (cpp/weights/ggml_blocks.h), HELM's own formats, whose bytes are those of a slice, and matrices
// in several pieces (cpp/weights/pieces.h).
enum class Stored : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4,
  kC8S32,
  kC4KM32,
  kGptq4,
  kGptq4V2,
  kGptq8,
  kGptq8V2,
  kAwq4,
  kCt4,
  kCt8,
  kF8E4M3,
  kMx4,
  kColumns
};

struct StoredRow {
  const char* name;     // in plans
  int64_t block_cols;   // a row of a matrix has a multiple of so many columns,
  int64_t block_bytes;  // and each block of them takes so many bytes; 0: strips of 16 rows do
  Format exact;         // holds every value as it is; of pieces, these say which does
};
inline constexpr int64_t kPieces = -1;  // as block_bytes
// By Stored.
inline constexpr StoredRow kStoredRows[] = {
    {"f32", 1, 4, {Codes::kF32}},
    {"f16", 1, 2, {Codes::kF16}},
    {"bf16", 1, 2, {Codes::kBF16}},
    {"ggml.q4_0", 32, 18, {Codes::kC4, Scales::kS, 32, 8}},
    {"ggml.q4_1", 32, 20, {Codes::kC4, Scales::kM, 32}},
    {"ggml.q5_0", 32, 22, {Codes::kC5, Scales::kS, 32, 16}},
    {"ggml.q5_1", 32, 24, {Codes::kC5, Scales::kM, 32}},
    {"ggml.q8_0", 32, 34, {Codes::kC8, Scales::kS, 32, 128}},
    {"ggml.q2_k", 256, 84, {Codes::kC4, Scales::kKM, 16}},
    {"ggml.q3_k", 256, 110, {Codes::kC4, Scales::kK, 16, 4}},
    {"ggml.q4_k", 256, 144, {Codes::kC4, Scales::kKM, 32}},
    {"ggml.q5_k", 256, 176, {Codes::kC5, Scales::kKM, 32}},
    {"ggml.q6_k", 256, 210, {Codes::kC6, Scales::kK, 16, 32}},
    {"ggml.iq4_nl", 32, 18, {Codes::kNL4, Scales::kS, 32}},
    {"ggml.iq4_xs", 256, 136, {Codes::kNL4, Scales::kK, 32}},
    {"ggml.mxfp4", 32, 17, {Codes::kMX4, Scales::kE, 32}},
    {"c8.s32", 1, 0, {Codes::kC8, Scales::kS, 32, 128}},
    {"c4.km32", 1, 0, {Codes::kC4, Scales::kKM, 32}},
    {"gptq4", 1, kPieces, {}},
    {"gptq4v2", 1, kPieces, {}},
    {"gptq8", 1, kPieces, {}},
    {"gptq8v2", 1, kPieces, {}},
    {"awq4", 1, kPieces, {}},
    {"ct4", 1, kPieces, {}},
    {"ct8", 1, kPieces, {}},
    {"f8e4m3", 1, kPieces, {}},
    {"mx4", 1, kPieces, {}},
    {"columns", 1, kPieces, {}}};

constexpr const StoredRow& row_of(Stored stored) {
  return kStoredRows[static_cast<int>(stored)];
}
constexpr const char* stored_name(Stored stored) {
  return row_of(stored).name;
}
// Whether rows lie in strips, as in a packed slice.
constexpr bool is_packed(Stored stored) {
  return row_of(stored).block_bytes == 0;
}
// Whether a matrix consists of several tensors of the checkpoint.
constexpr bool is_pieces(Stored stored) {
  return row_of(stored).block_bytes == kPieces;
}
// Bytes of an element of a piece; 0 for a dtype that none has.
constexpr int64_t piece_element_bytes(std::string_view dtype) {
  if (dtype == "f32" || dtype == "i32") return 4;
  if (dtype == "f16" || dtype == "bf16") return 2;
  return dtype == "i8" || dtype == "u8" || dtype == "f8e4m3" ? 1 : 0;
}
// A row of `cols` columns, a multiple of block_cols; of strips, its share of one.
constexpr int64_t stored_bytes(Stored stored, int64_t cols) {
  if (is_packed(stored)) return strip_bytes(row_of(stored).exact, cols) / kStripRows;
  return cols / row_of(stored).block_cols * row_of(stored).block_bytes;
}
// Rows with those that fill the last strip.
constexpr int64_t stored_rows(Stored stored, int64_t rows) {
  return is_packed(stored) ? format_round_up(rows, kStripRows) : rows;
}

constexpr Stored stored_of(DType dtype) {
  return static_cast<Stored>(dtype);
}
constexpr bool is_dense(Stored stored) {
  return stored <= Stored::kBF16;
}
constexpr DType dtype_of(Stored stored) {  // of dense ones only
  return static_cast<DType>(stored);
}
// Whether the bytes of a file are those of a slice, and where these may be read in its pages.
constexpr bool same_bytes(Stored stored, const Format& format) {
  return (is_dense(stored) || is_packed(stored)) && row_of(stored).exact == format;
}

constexpr int64_t mapped_alignment(Stored stored) {
  return is_packed(stored) ? kFormatLine : row_of(stored).block_bytes;
}

// HELM's own formats, which any weights are quantised to: q8 and q4.
constexpr bool is_own(const Format& format) {
  return format == Format{Codes::kC8, Scales::kS, 32, 128} ||
         format == Format{Codes::kC4, Scales::kKM, 32};
}
// Whether weights that are stored so can be held in a format; of pieces, these say it themselves.
// (bf16c: by way of bf16.)
constexpr bool encodes(Stored stored, const Format& format) {
  return is_pieces(stored) || !is_packed(format) || format == row_of(stored).exact ||
         is_own(format);
}

// Throws Error{kInvalid}, which names all, for any other name.
inline Stored stored_from_name(std::string_view name) {
  std::string known;
  int index = 0;
  for (const StoredRow& row : kStoredRows) {
    if (name == row.name) return static_cast<Stored>(index);
    known += (index++ == 0 ? "" : ", ") + std::string(row.name);
  }
  throw Error(ErrorKind::kInvalid,
              "unknown encoding \"" + std::string(name) + "\" of weights; known: " + known);
}

}  // namespace helm
