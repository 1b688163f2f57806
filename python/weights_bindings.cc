// The module's part for weights in memory: from the encodings of checkpoints to HELM's formats.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <new>
#include <tuple>

#include "bindings.h"
#include "helm/encode.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

using ByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// By name: dtype, shape and bytes. What the arrays hold is read until the call returns.
using Pieces = std::map<std::string, std::tuple<std::string, std::vector<int64_t>, ByteArray>>;

StoredWeights stored_weights(const std::string& stored, const Pieces& pieces, int64_t rows,
                             int64_t cols, const std::string& name, bool sort_columns,
                             int64_t first_row = 0) {
  StoredWeights weights;
  weights.name = name;
  weights.first_row = first_row;
  weights.stored = stored;
  weights.rows = rows;
  weights.cols = cols;
  weights.sort_columns = sort_columns;
  size_t bytes = 0;
  for (const auto& [key, piece] : pieces) {
    const auto& [dtype, shape, data] = piece;
    weights.pieces[key] = {dtype, shape, std::as_bytes(std::span(data.data(), data.size()))};
    bytes += data.size();
  }
  // Before memory is asked for: no encoding has more than four weights per byte.
  if (rows >= 1 && cols >= 1 && rows <= static_cast<int64_t>(4 * bytes) / cols) return weights;
  throw Error(ErrorKind::kInvalid, "[load] tensor \"" + name + "\" has " + std::to_string(bytes) +
                                       " bytes, too few for [" + std::to_string(rows) + ", " +
                                       std::to_string(cols) + "]; give all of its rows");
}

// Memory of n elements that an array of Python owns, aligned as a matrix is.
template <typename T>
std::pair<T*, nb::capsule> fresh(int64_t n) {
  constexpr std::align_val_t kAlignment{kFormatLine};
  auto* data = static_cast<T*>(operator new(static_cast<size_t>(n) * sizeof(T), kAlignment));
  return {data, nb::capsule(data, [](void* p) noexcept { operator delete(p, kAlignment); })};
}

nb::list encodings() {
  nb::list out;
  for (const StoredEncoding& encoding : stored_encodings()) {
    nb::dict entry;
    entry["name"] = encoding.name;
    entry["block_cols"] = encoding.block_cols;
    entry["block_bytes"] = encoding.block_bytes;
    out.append(entry);
  }
  return out;
}

nb::object encode(const std::string& stored, const Pieces& pieces, int64_t rows, int64_t cols,
                  const std::string& to, const std::string& name, bool sort_columns,
                  int64_t first_row) {
  const StoredWeights weights =
      stored_weights(stored, pieces, rows, cols, name, sort_columns, first_row);
  const Format format = to.empty() ? exact_format(weights) : format_from_name(to);
  const int64_t bytes = format_bytes(format, rows, cols);
  const auto [out, owner] = fresh<uint8_t>(bytes);
  const std::span<uint8_t> place(out, static_cast<size_t>(bytes));
  {
    const Released released;
    encode_weights(weights, format, std::as_writable_bytes(place));
  }
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(out, {place.size()}, owner));
}

nb::object read(const std::string& stored, const Pieces& pieces, int64_t rows, int64_t cols,
                const std::string& name, int64_t first_row) {
  const StoredWeights weights = stored_weights(stored, pieces, rows, cols, name, false, first_row);
  const auto [out, owner] = fresh<float>(rows * cols);
  const std::span<float> place(out, static_cast<size_t>(rows * cols));
  {
    const Released released;
    read_weights(weights, place);
  }
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
      out, {static_cast<size_t>(rows), static_cast<size_t>(cols)}, owner));
}

std::string exact(const std::string& stored, const Pieces& pieces, int64_t rows, int64_t cols,
                  const std::string& name, bool sort_columns) {
  return format_name(exact_format(stored_weights(stored, pieces, rows, cols, name, sort_columns)));
}

std::vector<int32_t> order(const std::string& stored, const Pieces& pieces, int64_t rows,
                           int64_t cols, const std::string& name) {
  return column_order(stored_weights(stored, pieces, rows, cols, name, true));
}

}  // namespace

void bind_weights(nb::module_& m) {
  m.def("stored_encodings", &encodings,
        "How checkpoints store matrices that HELM reads: dicts of name and, of f16 and GGML's "
        "types,\nblock_cols and block_bytes: a row is blocks of so many columns and bytes.");
  m.def("exact_format", &exact, "stored"_a, "pieces"_a, "rows"_a, "cols"_a, "name"_a = "weights",
        "sort_columns"_a = false,
        "The format that holds every value of a matrix as it is; f32 where no packed one does.");
  m.def(
      "encode_weights", &encode, "stored"_a, "pieces"_a, "rows"_a, "cols"_a, "to"_a = "",
      "name"_a = "weights", "sort_columns"_a = false, "first_row"_a = 0,
      "A matrix stored as one of stored_encodings in format `to`, or in the exact one: uint8 "
      "[bytes].\npieces: (dtype, shape, uint8 [bytes]) by name. To f32, f16 or bf16 each value "
      "is rounded once.\nsort_columns: where groups of columns do not adjoin, packed formats have "
      "them in column_order. first_row: what errors call\nrow 0, of a part of GGML's rows.\nRaises "
      "InvalidError for pieces or formats that do not fit, "
      "CheckpointError where a scale or a\nweight is NaN or infinite.");
  m.def("read_weights", &read, "stored"_a, "pieces"_a, "rows"_a, "cols"_a, "name"_a = "weights",
        "first_row"_a = 0,
        "The values of a matrix stored so, f32 [rows, cols]. Raises as encode_weights.");
  m.def(
      "column_order", &order, "stored"_a, "pieces"_a, "rows"_a, "cols"_a, "name"_a = "weights",
      "The column of the matrix that each column of its packed format is; none where they are the "
      "same.");
}

}  // namespace helm
