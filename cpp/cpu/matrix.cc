#include "cpu/matrix.h"

#include <algorithm>

#include "base/check.h"
#include "cpu/compression.h"

namespace helm::cpu {
namespace {

// What matrices have in common whose kernels round A to a dtype.
class RoundingMatrix : public Matrix {
 public:
  RoundingMatrix(const Format& format, DType dtype, int64_t rows, int64_t cols,
                 const KernelTable& kernels)
      : Matrix(format, rows, cols), kernels_(kernels), dtype_(static_cast<int>(dtype)) {}

  InputKind input_kind() const override { return static_cast<InputKind>(dtype_); }
  bool packs_as(const Matrix& other) const override {
    const auto* same = dynamic_cast<const RoundingMatrix*>(&other);
    return same != nullptr && kernels_.pack[dtype_] == kernels_.pack[same->dtype_] &&
           kernels_.direct_tokens[dtype_] == kernels_.direct_tokens[same->dtype_];
  }
  int64_t tiles_to_pack(int64_t tokens) const override {
    return cpu::tiles_to_pack(kernels_, static_cast<DType>(dtype_), tokens);
  }
  void pack(const PackArgs& args, int64_t tile) const override {
    kernels_.pack[dtype_](args, tile);
  }

 protected:
  const KernelTable& kernels_;
  const int dtype_;
};

// f32, f16, bf16: elements row by row.
class DenseMatrix final : public RoundingMatrix {
 public:
  DenseMatrix(const Format& format, const std::byte* data, int64_t rows, int64_t cols,
              const KernelTable& kernels)
      : RoundingMatrix(format, dtype_of(format), rows, cols, kernels),
        data_(data),
        row_bytes_(cols * dtype_bytes(dtype_of(format))) {}

  void multiply(const MatmulArgs& args, int64_t row) const override {
    MatmulArgs with = args;
    with.w = data_ + row * row_bytes_;
    kernels_.matmul[dtype_](with);
  }
  void read_row(int64_t row, float* out) const override {
    kernels_.widen[dtype_](data_ + row * row_bytes_, out, cols());
  }
  int64_t read_after_tokens() const override { return kernels_.read_after_tokens[dtype_]; }

 private:
  const std::byte* data_;
  int64_t row_bytes_;
};

// bf16c: bf16 in 12 bits each (cpu/kernels/compressed.h), with the products of bf16.
class CompressedBF16 final : public RoundingMatrix {
 public:
  CompressedBF16(const Format& format, const std::byte* data, int64_t rows, int64_t cols,
                 const KernelTable& kernels)
      : RoundingMatrix(format, DType::kBF16, rows, cols, kernels),
        matrix_(CompressedMatrix::at(data, rows, cols)) {}

  void multiply(const MatmulArgs& args, int64_t row) const override {
    kernels_.matmul_compressed(args, matrix_.from(row));
  }
  void read_row(int64_t row, float* out) const override {
    uint16_t some[kChunk];
    for (int64_t k = 0; k < cols(); k += kChunk) {
      const int64_t n = std::min(kChunk, cols() - k);
      read_compressed(kernels_, matrix_, row, k, n, some);
      kernels_.widen[dtype_](some, out + k, n);
    }
  }

 private:
  CompressedMatrix matrix_;
};

// Strips of codes and scales, which multiply A in eight bits.
class PackedMatrix final : public Matrix {
 public:
  PackedMatrix(const Format& format, const std::byte* data, int64_t rows, int64_t cols,
               const IntegerTable& kernels)
      : Matrix(format, rows, cols),
        kernels_(kernels),
        data_(data),
        strip_bytes_(strip_bytes(format, cols)),
        blocks_(quant_blocks(cols)) {}

  InputKind input_kind() const override { return InputKind::kInt8; }
  bool packs_as(const Matrix& other) const override {
    return other.input_kind() == InputKind::kInt8;
  }
  int64_t tiles_to_pack(int64_t tokens) const override {
    return tokens <= kDecodeTokens ? 0 : (tokens + kTileTokens - 1) / kTileTokens;
  }
  void pack(const PackArgs& args, int64_t tile) const override {
    const int64_t first = tile * kTileTokens;
    pack_rows(args, first, std::min(kTileTokens, args.tokens - first));
  }
  void pack_rows(const PackArgs& args, int64_t first, int64_t count) const override {
    quantise(args.a + first * args.a_stride, args.a_stride, count,
             static_cast<QuantBlock*>(args.packed) + first * blocks_);
  }
  void multiply(const MatmulArgs& args, int64_t row) const override {
    QuantArgs with{};
    if (args.tokens > kDecodeTokens) {
      with.a = static_cast<const QuantBlock*>(args.packed);
    } else {
      auto* blocks = static_cast<QuantBlock*>(args.scratch);
      if (!args.same_input) quantise(args.a, args.a_stride, args.tokens, blocks);
      with.a = blocks;
    }
    with.tokens = args.tokens;
    with.strips = strip(row);
    with.format = format(), with.rows = args.rows, with.cols = cols();
    with.bias = args.bias, with.accumulate = args.accumulate;
    with.c = args.c, with.c_stride = args.c_stride;
    with.slice = args.slice, with.slices = args.slices;
    kernels_.product(with);
  }
  void multiply_chosen(const ChosenRows& args, int64_t row) const override {
    QuantArgs with{};
    with.a = static_cast<const QuantBlock*>(args.packed);
    with.a_rows = args.a_rows, with.tokens = args.tokens;
    with.strips = strip(row);
    with.format = format(), with.rows = args.rows, with.cols = cols();
    with.bias = args.bias;
    with.c = args.c, with.c_stride = args.c_stride;
    kernels_.product(with);
  }
  void read_row(int64_t row, float* out) const override {
    kernels_.read_row(format(), strip(row), static_cast<int>(row % kStripRows), cols(), out);
  }

 private:
  static constexpr int64_t kTileTokens = 4;

  const std::byte* strip(int64_t row) const { return data_ + row / kStripRows * strip_bytes_; }
  void quantise(const float* a, int64_t stride, int64_t tokens, QuantBlock* out) const {
    kernels_.quantize_rows({a, stride, tokens, cols(), out});
  }

  const IntegerTable& kernels_;
  const std::byte* data_;
  int64_t strip_bytes_;
  int64_t blocks_;  // of a row of A
};
// So packed_bytes() is enough for A.
static_assert(sizeof(QuantBlock) <= kBlockCols * sizeof(float));

}  // namespace

void Matrix::pack_rows(const PackArgs&, int64_t, int64_t) const {}

// So few rows at a time that no tier packs them.
void Matrix::multiply_chosen(const ChosenRows& args, int64_t row) const {
  for (int64_t first = 0; first < args.tokens; first += kDecodeTokens) {
    MatmulArgs some{};
    some.tokens = std::min(kDecodeTokens, args.tokens - first);
    some.a = args.a + first * args.a_stride, some.a_stride = args.a_stride;
    if (args.a_rows != nullptr) {
      for (int64_t t = 0; t < some.tokens && !args.same_rows; ++t) {
        std::copy_n(args.a + args.a_rows[first + t] * args.a_stride, cols_,
                    args.gathered + t * cols_);
      }
      some.a = args.gathered, some.a_stride = cols_;
    }
    some.rows = args.rows, some.cols = cols_, some.bias = args.bias;
    some.c = args.c + first * args.c_stride, some.c_stride = args.c_stride;
    some.scratch = args.scratch;
    multiply(some, row);
  }
}

bool multiplies(const KernelTable&, const Format& format) {
  return is_dense(format) || is_packed(format) || format.codes == Codes::kBF16C;
}

std::unique_ptr<Matrix> make_matrix(const Format& format, const std::byte* data, int64_t rows,
                                    int64_t cols, const KernelTable& kernels,
                                    const IntegerTable& integers) {
  if (is_packed(format)) {
    return std::make_unique<PackedMatrix>(format, data, rows, cols, integers);
  }
  if (is_dense(format)) return std::make_unique<DenseMatrix>(format, data, rows, cols, kernels);
  if (format.codes == Codes::kBF16C) {
    return std::make_unique<CompressedBF16>(format, data, rows, cols, kernels);
  }
  fail(ErrorKind::kInvalid, "[cpu] there are no kernels for weights in format ",
       format_name(format), "; make the plan anew with another dtype");
}

}  // namespace helm::cpu
