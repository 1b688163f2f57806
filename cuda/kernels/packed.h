// The contract of kernels that read packed weights (helm/tiles.h) as they lie. Knows nothing of
// plans.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "helm/tiles.h"
#include "kernels.h"

namespace helm::cuda {

// Bytes from the begin of a span to its parts; groups of columns are [group][16 rows].
struct PackedSpan {
  int32_t second;   // the second array of groups
  int32_t of_span;  // f16 d, then e
  int32_t codes;    // the blocks
};

// A packed matrix with its layout, so that kernels compute no sizes.
struct PackedMatrix {
  PackedMatrix() = default;
  PackedMatrix(const void* weights, const Format& format, int64_t rows, int64_t cols);

  const uint8_t* strips;  // of the first row, aligned to 64 bytes
  Codes codes;
  Scales scales;
  bool halves;      // groups of 16 columns, two per block
  bool wide;        // 16-bit scales are bf16
  int offset;       // see Format
  int group_shift;  // a group has so many blocks, as a power of two
  int64_t rows;
  int64_t cols;
  int64_t strip_bytes;
  int64_t span_bytes;  // of all spans but the last
  int32_t strip_header;
  int32_t last_span;  // index
  PackedSpan whole, last;
};

// 32 activations of one token by the CPU's rule: x(k) is about n(k) alpha, with alpha = a / 127 and
// integers n rounded to the nearest, ties to even. a is max |x|, unless no other |x| is more than
// half of it. Then that one is far out: a is max |x| of the others, but at least |x| / 127, and
// n(far_col) = q(far_col) + 128 far; n(k) = q(k) of the others. far is 0 where none is far out.
// alpha and n are 0 where alpha would be denormal, and alpha is NaN where an x is not finite.
// Behind the last column are zeros.
struct alignas(16) QuantBlock {
  int8_t q[kBlockCols];
  float alpha;
  int32_t sums[2];  // of the first and of the last 16 n
  int16_t far;
  int16_t far_col;
};
inline constexpr int kFarShift = 7;

struct QuantizeArgs {
  const float* x;    // [tokens, cols], rows x_stride apart
  int64_t x_stride;  // elements
  int64_t tokens;
  int64_t cols;
  QuantBlock* out;  // [tokens, blocks of 32 columns]
};
void quantize(const QuantizeArgs& args, const Queue& queue);

// For few tokens. C(t, r) starts as [C(t, r) +] [bias(r)]; then, for each block in order,
//   C = fma(float(sum_k v(u(r, k)) n(t, k)), s alpha, C)            v(u), s and m: see Scales
//   C = fma(m, alpha sum_k n(t, k), C)     with m, -s z or -e n, where the scales have a minimum
// In groups of 16, both for the first and then both for the last 16 columns. So the bits are those
// of the CPU, whatever the number of tokens.
struct PackedMatvecArgs {
  const QuantBlock* a;  // [tokens, blocks]
  int64_t tokens;       // 1 to kMatvecTokens
  PackedMatrix w;
  const float* bias;  // [rows] or null
  bool accumulate;
  float* c;  // [tokens, rows], rows c_stride apart
  int64_t c_stride;
};
void packed_matvec(const PackedMatvecArgs& args, const Queue& queue);

// y(i, :) = w(first_row + i, :) in `dtype` (f16 or bf16), rounded as narrow() does; contiguous.
struct ExpandArgs {
  PackedMatrix w;
  int64_t first_row;
  int64_t rows;
  void* y;  // [rows, w.cols], aligned to 16 bytes
  DType dtype;
};
void expand(const ExpandArgs& args, const Queue& queue);

// As embedding() and position_embedding(), each operation of Scales rounded once.
void packed_embedding(const PackedMatrix& table, float scale, float* out, int64_t tokens,
                      const StepTables& step, const Queue& queue);
void packed_position_embedding(const PackedMatrix& table, int64_t offset, float* out,
                               int64_t tokens, const StepTables& step, const Queue& queue);

}  // namespace helm::cuda
