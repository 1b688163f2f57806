// Weights in memory to the formats of helm/format.h, as an engine encodes them while it loads: for
// programs that write model folders, and for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "helm/format.h"
#include "helm/types.h"

namespace helm {

// A tensor of a checkpoint: the weights of a matrix, or what belongs to them.
struct StoredPiece {
  std::string dtype;  // "f32", "f16", "bf16", "f8e4m3", "i32", "i8", "u8"
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

// A matrix as a checkpoint stores it.
struct StoredWeights {
  std::string name;       // for errors,
  int64_t first_row = 0;  // and what they call row 0, of a part of a tensor
  std::string stored;     // one of stored_encodings()
  int64_t rows = 0;
  int64_t cols = 0;
  std::map<std::string, StoredPiece> pieces;  // by the end of their names in the checkpoint
  // Of weights in groups of columns that do not adjoin (GPTQ's act-order): packed formats have the
  // columns in the order of column_order(). Without it such weights have no packed format.
  bool sort_columns = false;
};

struct StoredEncoding {
  std::string name;         // "f16", "ggml.q4_k", "c4.km32", "gptq4"
  int64_t block_cols = 1;   // of f16 and GGML's types: a row has a multiple of so many columns,
  int64_t block_bytes = 0;  // each block of them takes so many bytes
};
HELM_API std::vector<StoredEncoding> stored_encodings();

// The format that holds every value as it is; f32 where no packed format does.
HELM_API Format exact_format(const StoredWeights& weights);

// format_bytes(to, rows, cols) bytes, aligned to 64, in `out`. `to` is the exact format; a dense
// one, for which each value is rounded once; c8.s32 or c4.km32, to which values are quantised; or
// the s kind of an exact z kind whose zero points are all in the middle. Throws Error{kInvalid} for
// an unknown encoding, pieces that do not fit, or another format; Error{kIo} where a scale or a
// weight is NaN or infinite.
HELM_API void encode_weights(const StoredWeights& weights, const Format& to,
                             std::span<std::byte> out);

// The values in f32, those of the encoding's own formula to the bit. out: [rows, cols]. Throws as
// encode_weights.
HELM_API void read_weights(const StoredWeights& weights, std::span<float> out);

// Column j of the packed format is column order[j] of the matrix; empty where they are the same.
HELM_API std::vector<int32_t> column_order(const StoredWeights& weights);

}  // namespace helm
