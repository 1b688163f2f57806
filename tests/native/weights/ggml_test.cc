// Matrices of GGUF files on their way into packed formats: ragged sizes, rows that lie apart, guard
// bytes. The oracle reads codes bit by bit where helm/tiles.h says that they lie; the values of
// every type are checked against the gguf package, in tests/weights/test_ggml.py.
#include "weights/ggml.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernels/vec.h"
#include "helm/encode.h"
#include "helm/tiles.h"
#include "support/check.h"

using namespace helm;
using helm::test::Guarded;

namespace {

// Random blocks whose halves are finite: the second byte of each pair loses a bit of its exponent,
// and MXFP4's exponents stay small.
std::vector<std::byte> blocks(Stored type, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> data(static_cast<size_t>(rows * stored_bytes(type, cols)));
  for (std::byte& byte : data) byte = std::byte(rng() & 0xbf);
  return data;
}

uint16_t half_at(const std::byte* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// The value of one weight of a packed matrix.
float weight(const Format& format, const std::byte* matrix, int64_t cols, int64_t row,
             int64_t col) {
  const int64_t k0 = col / kSpanCols * kSpanCols, n = span_cols(format, cols, k0);
  const int r = static_cast<int>(row % kStripRows);
  const std::byte* span = matrix + strip_at(format, cols, row / kStripRows) + span_at(format, k0);
  const int64_t g = (col - k0) / format.group;
  const auto* block = reinterpret_cast<const uint8_t*>(span) + block_at(format, n, col - k0);
  const int code = read_code(format.codes, block, r, static_cast<int>(col % kBlockCols));
  const auto half = [&](int which) {
    return cpu::f32_from_f16(
        half_at(span + group_array_at(format, n, which) + (g * kStripRows + r) * 2));
  };
  const auto byte = [&](int which) {
    return static_cast<uint8_t>(span[group_array_at(format, n, which) + g * kStripRows + r]);
  };
  const auto of_span = [&](int which) {
    return cpu::f32_from_f16(half_at(span + span_array_at(format, n, which) + r * 2));
  };
  const int8_t* values = row_of(format.codes).values;
  const auto v = static_cast<float>(values != nullptr ? values[code] : code - format.offset);
  switch (format.scales) {
    case Scales::kS:
      return half(0) * v;
    case Scales::kM:
      return half(0) * v + half(1);
    case Scales::kE:
      return __builtin_ldexpf(v, byte(0) - 128);
    case Scales::kK:
      return of_span(0) * static_cast<float>(static_cast<int8_t>(byte(0))) * v;
    case Scales::kKM:
      return of_span(0) * static_cast<float>(byte(0)) * v -
             of_span(1) * static_cast<float>(byte(1));
    default:
      FAIL("no type of GGML has such scales");
      return 0;
  }
}

const cpu::KernelTable& kernels() {
  return *cpu::kernels_of(cpu::Isa::kScalar);
}

// All rows, strip by strip.
std::vector<std::byte> packed(const GgmlMatrix& matrix) {
  const Format& format = matrix.exact();
  const int64_t bytes = format_bytes(format, matrix.rows(), matrix.cols());
  Guarded<std::byte> out(bytes);
  std::memset(out.data(), 0x5a, static_cast<size_t>(bytes));
  for (int64_t row = 0; row < matrix.rows(); row += kStripRows) {
    const int64_t count = std::min(kStripRows, matrix.rows() - row);
    encode(matrix, format, kernels(), row, count,
           out.data() + strip_at(format, matrix.cols(), row / kStripRows));
  }
  CHECK(out.intact());
  return out.copy();
}

std::vector<Stored> quantised_types() {
  std::vector<Stored> types;
  for (size_t i = 0; i < std::size(kStoredRows); ++i) {
    const auto type = static_cast<Stored>(i);
    if (row_of(type).block_bytes > 0 && !is_dense(type)) types.push_back(type);
  }
  return types;
}

// The row as read, and the same weights of the packed matrix.
void check_row(const GgmlMatrix& matrix, const std::byte* out, int64_t row) {
  std::vector<float> want(static_cast<size_t>(matrix.cols())), got;
  matrix.read_row(row, want.data());
  for (int64_t k = 0; k < matrix.cols(); ++k) {
    got.push_back(weight(matrix.exact(), out, matrix.cols(), row, k));
  }
  const std::string label = std::string(format_name(matrix.exact())) + " row " +
                            std::to_string(row) + " of " + std::to_string(matrix.rows());
  CHECK(test::compare_bits(got, want, label) == "");
}

}  // namespace

TEST_CASE("packed matrices have the values of their blocks, at ragged sizes, within their bytes") {
  for (const Stored type : quantised_types()) {
    const int64_t blocks_of_row = row_of(type).block_cols == 256 ? 2 : 9;
    for (const int64_t rows : {1, 15, 16, 17, 33}) {
      for (const int64_t n : {int64_t{1}, blocks_of_row}) {
        const int64_t cols = n * row_of(type).block_cols;
        const Guarded<std::byte> data(blocks(type, rows, cols, static_cast<uint32_t>(rows)));
        const GgmlMatrix matrix("w", type, {{data.data(), rows, stored_bytes(type, cols)}}, cols);
        const auto out = packed(matrix);
        for (int64_t row = 0; row < rows; ++row) check_row(matrix, out.data(), row);
        for (int64_t row = rows; row % kStripRows != 0; ++row) {
          for (int64_t k = 0; k < cols; k += 31) {
            CHECK(weight(row_of(type).exact, out.data(), cols, row, k) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("rows that lie apart give the bytes of rows side by side") {
  for (const Stored type : quantised_types()) {
    const int64_t cols = 512, rows = 40, bytes = stored_bytes(type, cols);
    const Guarded<std::byte> data(blocks(type, rows, cols, 7));
    // Every second row first, then the others; the last eight are a run of their own.
    const std::byte* first = data.data();
    const std::vector<RowRun> runs = {
        {first, 16, 2 * bytes}, {first + bytes, 16, 2 * bytes}, {first + 32 * bytes, 8, bytes}};
    Guarded<std::byte> sorted(rows * bytes);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = row < 16 ? 2 * row : row < 32 ? 2 * (row - 16) + 1 : row;
      std::memcpy(sorted.data() + row * bytes, first + from * bytes, static_cast<size_t>(bytes));
    }
    const auto apart = packed(GgmlMatrix("w", type, runs, cols));
    const auto beside = packed(GgmlMatrix("w", type, {{sorted.data(), rows, bytes}}, cols));
    CHECK(apart == beside);
  }
}

TEST_CASE("dense formats get each row's values rounded once") {
  for (const Stored type : quantised_types()) {
    const int64_t cols = 256, rows = 3;
    const Guarded<std::byte> data(blocks(type, rows, cols, 3));
    const GgmlMatrix matrix("w", type, {{data.data(), rows, stored_bytes(type, cols)}}, cols);
    Guarded<float> wide(rows * cols);
    Guarded<uint16_t> narrow(rows * cols);
    encode(matrix, format_of(DType::kF32), kernels(), 0, rows,
           reinterpret_cast<std::byte*>(wide.data()));
    encode(matrix, format_of(DType::kBF16), kernels(), 0, rows,
           reinterpret_cast<std::byte*>(narrow.data()));
    std::vector<float> row(cols);
    for (int64_t r = 0; r < rows; ++r) {
      matrix.read_row(r, row.data());
      for (int64_t k = 0; k < cols; ++k) {
        const float value = row[static_cast<size_t>(k)];
        CHECK(cpu::bits_from_f32(wide.data()[r * cols + k]) == cpu::bits_from_f32(value));
        CHECK(narrow.data()[r * cols + k] == cpu::bf16_from_f32(value));
      }
    }
    CHECK(wide.intact());
    CHECK(narrow.intact());
  }
}

TEST_CASE("a scale that is not finite is an error that names tensor, row and columns") {
  const Stored type = Stored::kQ4_0;
  const int64_t cols = 288, rows = 18, bytes = stored_bytes(type, cols);
  Guarded<std::byte> data(blocks(type, rows, cols, 1));
  data.data()[17 * bytes + 8 * row_of(type).block_bytes + 1] =
      std::byte{0x7c};  // of the last block
  const GgmlMatrix matrix("blk.0.ffn_up.weight", type, {{data.data(), rows, bytes}}, cols);
  Guarded<std::byte> out(format_bytes(row_of(type).exact, rows, cols));
  try {
    encode(matrix, row_of(type).exact, kernels(), 0, rows, out.data());
    FAIL("an infinite scale was taken");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kIo);
    CHECK(std::string(error.what())
              .find("tensor \"blk.0.ffn_up.weight\" has a scale or a weight "
                    "that is NaN or infinite in row 17, columns 256 to 287") != std::string::npos);
  }
}

TEST_CASE("a sign flip of one code, or of one scale, is seen") {
  const Stored type = Stored::kQ8_0;
  Guarded<std::byte> data(blocks(type, 16, 32, 9));
  const auto before = packed(GgmlMatrix("w", type, {{data.data(), 16, 34}}, 32));
  for (const int64_t at : {int64_t{5 * 34 + 1}, int64_t{9 * 34 + 20}}) {
    data.data()[at] ^= std::byte{0x80};
    CHECK(packed(GgmlMatrix("w", type, {{data.data(), 16, 34}}, 32)) != before);
    data.data()[at] ^= std::byte{0x80};
  }
}
