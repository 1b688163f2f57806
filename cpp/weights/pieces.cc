#include "weights/pieces.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cpu/kernels/vec.h"
#include "helm/stored.h"

namespace helm {
namespace {

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Every kind of checkpoint beside GGML's; the only place where its name stands.
constexpr PiecesKind kKinds[] = {
    {"gptq4", open_gptq4},      {"gptq4v2", open_gptq4_v2}, {"gptq8", open_gptq8},
    {"gptq8v2", open_gptq8_v2}, {"awq4", open_awq4},        {"ct4", open_ct4},
    {"ct8", open_ct8},          {"f8e4m3", open_f8e4m3},    {"mx4", open_mx4},
    {"columns", open_columns},
};

}  // namespace

std::span<const PiecesKind> pieces_kinds() {
  return kKinds;
}

std::unique_ptr<StoredMatrix> open_pieces(const StoredWeights& weights) {
  const auto found =
      std::ranges::find_if(kKinds, [&](auto& kind) { return weights.stored == kind.stored; });
  return found->open(weights);
}

const StoredPiece* find_piece(const StoredWeights& weights, const char* name) {
  const auto found = weights.pieces.find(name);
  return found == weights.pieces.end() ? nullptr : &found->second;
}

const StoredPiece& piece_of(const StoredWeights& weights, const char* name,
                            std::initializer_list<std::string_view> dtypes, int64_t rows,
                            int64_t cols) {
  const StoredPiece* piece = find_piece(weights, name);
  if (piece == nullptr) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" lacks its ", name, ", which ",
         weights.stored, " needs; the checkpoint is not complete");
  }
  std::string known;
  for (const std::string_view dtype : dtypes) {
    known += (known.empty() ? "" : " or ") + std::string(dtype);
  }
  int64_t elements = 1;
  bool fits = piece->shape.size() == 2;
  for (const int64_t size : piece->shape) {
    fits = fits && size > 0 && elements <= (int64_t{1} << 50) / size;
    elements *= fits ? size : 1;
  }
  fits = fits && (rows == kAny || piece->shape[0] == rows) &&
         (cols == kAny || piece->shape[1] == cols);
  const bool right = std::find(dtypes.begin(), dtypes.end(), piece->dtype) != dtypes.end();
  const int64_t bytes = elements * piece_element_bytes(piece->dtype);
  if (fits && right && static_cast<int64_t>(piece->bytes.size()) == bytes) return *piece;
  const auto size_text = [](int64_t size) { return size == kAny ? "any" : std::to_string(size); };
  fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has a ", name, " of ",
       piece->dtype, " ", text_of(piece->shape), " in ", piece->bytes.size(), " bytes, expected ",
       known, " [", size_text(rows), ", ", size_text(cols), "] for ", weights.stored, " of [",
       weights.rows, ", ", weights.cols, "]");
}

const StoredPiece* find_order(const StoredWeights& weights, const char* name) {
  const StoredPiece* piece = find_piece(weights, name);
  if (piece == nullptr) return nullptr;
  const std::vector<int64_t> expected = {weights.cols};
  if (piece->dtype == "i32" && piece->shape == expected &&
      piece->bytes.size() == static_cast<size_t>(weights.cols) * 4) {
    return piece;
  }
  fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has a ", name, " of ",
       piece->dtype, " ", text_of(piece->shape), " in ", piece->bytes.size(),
       " bytes, expected i32 [", weights.cols, "]");
}

FloatPiece::FloatPiece(const StoredPiece& piece)
    : data(piece.bytes.data()),
      dtype(piece.dtype == "f32"    ? DType::kF32
            : piece.dtype == "bf16" ? DType::kBF16
                                    : DType::kF16) {}

uint16_t FloatPiece::bits(int64_t index) const {
  uint16_t value;
  std::memcpy(&value, data + index * 2, sizeof value);
  return value;
}

float FloatPiece::at(int64_t index) const {
  if (dtype == DType::kBF16) return cpu::f32_from_bf16(bits(index));
  if (dtype == DType::kF16) return cpu::f32_from_f16(bits(index));
  float value;
  std::memcpy(&value, data + index * 4, sizeof value);
  return value;
}

bool is_one_float(const StoredPiece* piece) {
  if (piece == nullptr || piece->shape.size() > 1) return false;
  const bool wide = piece->dtype == "f32";
  if (!wide && piece->dtype != "f16" && piece->dtype != "bf16") return false;
  return piece->bytes.size() == (wide ? 4u : 2u);
}

void spread_nibbles(const std::byte* from, int64_t n, uint8_t* code) {
  for (int64_t k = 0; k < n; k += 8) {
    uint32_t word;
    std::memcpy(&word, from + k / 2, sizeof word);
    uint64_t wide = word;  // each byte to the low half of 16 bits, then its high half beside it
    wide = (wide | wide << 16) & 0x0000ffff0000ffff;
    wide = (wide | wide << 8) & 0x00ff00ff00ff00ff;
    wide = (wide | wide << 4) & 0x0f0f0f0f0f0f0f0f;
    std::memcpy(code + k, &wide, sizeof wide);
  }
}

}  // namespace helm
