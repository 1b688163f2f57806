// The contract of products of packed weights (helm/format.h) with activations in eight bits. Every
// table gives the bits of every other: sums of integers are exact, and the order of what is rounded
// is part of the contract.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helm/format.h"

namespace helm::cpu {

// 32 activations of one token: x(k) is about n(k) alpha, with alpha = a / 127 and integers n
// rounded to the nearest, ties to even. a is max |x|, unless no other |x| is more than half of it.
// Then that one is far out: a is max |x| of the others, but at least |x| / 127, and n takes more
// than a byte: n(far_col) = q(far_col) + 128 far, n(k) = q(k) of the others. far is 0 where none is
// far out. alpha and n are 0 where alpha would be denormal, and alpha is NaN where an x is not
// finite. Then what products need of sums of n, all of them exact but for one rounding in those of
// floats.
struct QuantBlock {
  int8_t q[kBlockCols];
  float alpha;
  float alpha_sum;        // alpha * A, A being the sum of n
  float alpha_sums[2];    // the same of the first and of the last 16
  int32_t minus_sum;      // -A
  int32_t minus_sums[2];  // likewise
  int16_t far;
  int16_t far_col;
};
inline constexpr int kFarShift = 7;
static_assert(sizeof(QuantBlock) == 64);

// A row of activations takes so many; behind its last column are zeros.
constexpr int64_t quant_blocks(int64_t cols) {
  return (cols + kBlockCols - 1) / kBlockCols;
}

struct QuantizeArgs {
  const float* x;    // [tokens, cols], rows x_stride apart
  int64_t x_stride;  // elements
  int64_t tokens;
  int64_t cols;
  QuantBlock* out;  // [tokens, quant_blocks(cols)], aligned to 64 bytes
};

// C(t, r) starts as [C(t, r) +] [bias(r)]; then, for each block of 32 columns in order,
//   C = fma(float(sum_k v(u(r, k)) n(t, k)), s alpha, C)            v(u), s and m: see Scales
//   C = fma(m, alpha A, C)         with m, -s z or -e n, where the scales have a minimum
// In groups of 16, both for the first and then both for the last 16 columns. s is d l of k and km,
// which is exact. So C(t, r) depends on row t of the activations and row r of the weights alone.
struct QuantArgs {
  const QuantBlock* a;    // [any, quant_blocks(cols)]
  const int32_t* a_rows;  // [tokens]: the row of a of each token; null: 0, 1, ...
  int64_t tokens;
  const std::byte* strips;  // of the first row, aligned to 64 bytes
  Format format;            // a packed one
  int64_t rows;
  int64_t cols;
  const float* bias;  // [rows] or null
  bool accumulate;    // add to what C holds
  float* c;           // [tokens, rows], rows c_stride apart
  int64_t c_stride;   // elements
  // The call computes one slice of the rows; all slices together compute each row once. Which rows
  // are whose is up to the kernel: slices that follow each other go on where the one before has
  // stopped reading, in each of several places.
  int64_t slice = 0;
  int64_t slices = 1;
};

struct IntegerTable {
  const char* name;  // "scalar", "avx2", "avxvnni", "avx512vnni"
  void (*quantize_rows)(const QuantizeArgs&);
  void (*product)(const QuantArgs&);
  // Row r of a strip of so many columns as floats [cols], each operation of Scales rounded once.
  void (*read_row)(const Format& format, const std::byte* strip, int r, int64_t cols, float* out);
  // For probes: runs `rounds` of products in registers alone and returns how many operations, a
  // multiplication and an addition each counting as one, that was.
  double (*probe_dot)(int64_t rounds, int32_t* sink);
};

// Each is the one exported symbol of its file; null where it was not compiled for this target.
const IntegerTable* integer_scalar();
const IntegerTable* integer_avx2();
const IntegerTable* integer_avxvnni();
const IntegerTable* integer_avx512vnni();

}  // namespace helm::cpu
