// The public functions of helm/encode.h over the classes of this folder.
#include <algorithm>
#include <iterator>
#include <memory>

#include "base/check.h"
#include "cpu/isa.h"
#include "helm/encode.h"
#include "weights/ggml.h"
#include "weights/packed.h"
#include "weights/pieces.h"

namespace helm {
namespace {

std::unique_ptr<StoredMatrix> open_strips(const StoredWeights& weights, const Format& format) {
  const StoredPiece& piece =
      piece_of(weights, "weight", {"u8"}, format_round_up(weights.rows, kStripRows) / kStripRows,
               strip_bytes(format, weights.cols));
  return std::make_unique<PackedMatrix>(weights.name, format, piece.bytes.data(), weights.rows,
                                        weights.cols, weights.first_row);
}

std::unique_ptr<StoredMatrix> open_rows(const StoredWeights& weights, Stored stored) {
  if (is_packed(stored)) return open_strips(weights, row_of(stored).exact);
  const int64_t block = row_of(stored).block_cols;
  if (weights.cols % block != 0) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has ", weights.cols,
         " columns, expected whole blocks, of ", block, " columns in ", weights.stored);
  }
  const int64_t row_bytes = stored_bytes(stored, weights.cols);
  const StoredPiece& piece = piece_of(weights, "weight", {"u8"}, weights.rows, row_bytes);
  const std::vector<RowRun> runs = {{piece.bytes.data(), weights.rows, row_bytes}};
  return std::make_unique<GgmlMatrix>(weights.name, stored, runs, weights.cols, weights.first_row);
}

std::unique_ptr<StoredMatrix> open(const StoredWeights& weights) {
  if (weights.rows < 1 || weights.cols < 1) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" is [", weights.rows, ", ",
         weights.cols, "], expected at least one row and one column");
  }
  for (size_t i = 0; i < std::size(kStoredRows); ++i) {
    const auto stored = static_cast<Stored>(i);
    if (weights.stored != stored_name(stored)) continue;
    return is_pieces(stored) ? open_pieces(weights) : open_rows(weights, stored);
  }
  std::string known;
  for (const StoredEncoding& encoding : stored_encodings()) {
    known += (known.empty() ? "" : ", ") + encoding.name;
  }
  fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" is stored as \"", weights.stored,
       "\"; known: ", known);
}

void check_size(const StoredWeights& weights, size_t got, int64_t expected) {
  if (got == static_cast<size_t>(expected)) return;
  fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" gets ", got, " bytes, expected ",
       expected, " of [", weights.rows, ", ", weights.cols, "]");
}

}  // namespace

std::vector<StoredEncoding> stored_encodings() {
  std::vector<StoredEncoding> all;
  for (const StoredRow& row : kStoredRows) {
    all.push_back({row.name, row.block_cols, std::max<int64_t>(row.block_bytes, 0)});
  }
  return all;
}

Format exact_format(const StoredWeights& weights) {
  return open(weights)->exact();
}

void encode_weights(const StoredWeights& weights, const Format& to, std::span<std::byte> out) {
  const auto matrix = open(weights);
  if (!can_encode(matrix->exact(), to)) {
    refuse_format(matrix->name(), matrix->exact(), to);
  }
  check_size(weights, out.size(), format_bytes(to, weights.rows, weights.cols));
  encode(*matrix, to, cpu::select_kernels(), 0, weights.rows, out.data());
}

void read_weights(const StoredWeights& weights, std::span<float> out) {
  const auto matrix = open(weights);
  check_size(weights, out.size_bytes(), weights.rows * weights.cols * 4);
  for (int64_t row = 0; row < weights.rows; ++row) {
    matrix->read_row(row, out.data() + row * weights.cols);
  }
}

std::vector<int32_t> column_order(const StoredWeights& weights) {
  return open(weights)->column_order();
}

}  // namespace helm
