// A matrix of weights in host memory, in any format that the CPU multiplies with. Knows nothing of
// plans, ops and teams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/quant/integer.h"
#include "helm/format.h"

namespace helm::cpu {

// What a product makes of its input. A product of many tokens packs its input once for all parts of
// one kind; a product of few tokens leaves it in the scratch for the next one of the kind.
enum class InputKind : uint8_t { kF32, kF16, kBF16, kInt8 };

// C(t, r) = [bias(r)] + sum_k A(a_rows(t), k) * W(r, k)
struct ChosenRows {
  const float* a;         // [any, cols], rows a_stride apart
  int64_t a_stride;       // elements
  const void* packed;     // what pack_rows() has made of A, for InputKind::kInt8
  const int32_t* a_rows;  // [tokens], or null: 0, 1, ...
  int64_t tokens;
  int64_t rows;
  const float* bias;  // [rows] or null
  float* c;           // [tokens, rows], rows c_stride apart
  int64_t c_stride;   // elements
  void* scratch;      // as MatmulArgs has it, and
  float* gathered;    // [kDecodeTokens, cols]
  // Of kDecodeTokens at most: `gathered` has them already, if a_rows is not null.
  bool same_rows = false;
};

class Matrix {
 public:
  Matrix(const Format& format, int64_t rows, int64_t cols)
      : format_(format), rows_(rows), cols_(cols) {}
  virtual ~Matrix() = default;
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const Format& format() const { return format_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  // Rows are multiplied from multiples of so many on.
  int64_t row_unit() const { return helm::row_unit(format_); }

  // C = A W^T as MatmulArgs says, for the rows of W from `row` on, a multiple of row_unit(); args.w
  // is not read.
  virtual void multiply(const MatmulArgs& args, int64_t row) const = 0;
  // The same of chosen rows of A, with the bits that multiply() gives each.
  virtual void multiply_chosen(const ChosenRows& args, int64_t row) const;
  // A row as f32. out: [cols].
  virtual void read_row(int64_t row, float* out) const = 0;

  virtual InputKind input_kind() const = 0;
  // Whether products of many tokens with the other matrix take what pack() makes.
  virtual bool packs_as(const Matrix& other) const = 0;
  // Tiles that pack() makes for a product of so many tokens; 0 where multiply() reads A.
  virtual int64_t tiles_to_pack(int64_t tokens) const = 0;
  virtual void pack(const PackArgs& args, int64_t tile) const = 0;
  // Of more tokens than these, and kDecodeTokens at most, multiply() may take MatmulArgs::after.
  virtual int64_t read_after_tokens() const { return kDecodeTokens; }
  // Of InputKind::kInt8 what multiply_chosen() reads of rows [first, first + count) of A.
  virtual void pack_rows(const PackArgs&, int64_t first, int64_t count) const;

 private:
  Format format_;
  int64_t rows_;
  int64_t cols_;
};

// Whether there are kernels for a format.
bool multiplies(const KernelTable& kernels, const Format& format);

// What a product of few tokens with a packed matrix takes of MatmulArgs::scratch.
constexpr int64_t few_tokens_bytes(int64_t cols) {
  return kDecodeTokens * quant_blocks(cols) * static_cast<int64_t>(sizeof(QuantBlock));
}

// data: format_bytes(format, rows, cols), aligned as the format asks. The kernels and the data must
// outlive the matrix. Throws Error{kInvalid} for a format without kernels.
std::unique_ptr<Matrix> make_matrix(const Format& format, const std::byte* data, int64_t rows,
                                    int64_t cols, const KernelTable& kernels,
                                    const IntegerTable& integers);

}  // namespace helm::cpu
