// Rows of packed weights as numbers: panels for cuBLAS, and the rows of embeddings.
//
// A thread decodes one row of a block of columns.
#include <algorithm>

#include "packed.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = kRowsOfStrip * kBlocksOfSpan;
constexpr int64_t kMostRowBlocks = 65535;

__device__ __forceinline__ RowScale read_scale(const PackedMatrix& m, const PackedPlace& at,
                                               int group, int row) {
  switch (m.scales) {
    case Scales::kNone:
      break;
    case Scales::kS:
      return read_scale<Scales::kS>(m, at, group, row);
    case Scales::kM:
      return read_scale<Scales::kM>(m, at, group, row);
    case Scales::kZ:
      return read_scale<Scales::kZ>(m, at, group, row);
    case Scales::kE:
      return read_scale<Scales::kE>(m, at, group, row);
    case Scales::kK:
      return read_scale<Scales::kK>(m, at, group, row);
    case Scales::kKM:
      return read_scale<Scales::kKM>(m, at, group, row);
    case Scales::kR:
      return read_scale<Scales::kR>(m, at, group, row);
  }
  return {};
}

// op.store(i, column, values, count) for 32 columns, or as many as there are, of row op.row(i).
template <Codes C, class Op>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const PackedMatrix m, const int64_t rows, const Op op) {
  let_next_begin();
  await_previous();
  const int64_t block = int64_t{blockIdx.x} * kBlocksOfSpan + threadIdx.x / kRowsOfStrip;
  const int64_t col = block * kBlockCols;
  if (col >= m.cols) return;
  const int count = static_cast<int>(min(m.cols - col, kBlockCols));
  for (int64_t i = int64_t{blockIdx.y} * kRowsOfStrip + threadIdx.x % kRowsOfStrip; i < rows;
       i += int64_t{gridDim.y} * kRowsOfStrip) {
    const int64_t from = op.row(i);
    const int row = static_cast<int>(from % kRowsOfStrip);
    const PackedPlace at(m, from / kRowsOfStrip, block);
    unsigned words[kCodeWords<C>], quads[kQuads];
    load_codes<C>(at.codes<C>(), row, words);
    numbers<C>(words, quads);
    const bool minimum = m.scales == Scales::kM || m.scales == Scales::kKM;
    RowScale scale{};
    float values[kBlockCols];
#pragma unroll
    for (int k = 0; k < static_cast<int>(kBlockCols); ++k) {
      if (k == 0 || (k == 16 && m.halves)) {
        scale = read_scale(m, at, at.group(m, k / 16), row);
      }
      const int number = static_cast<int8_t>(quads[k / 4] >> k % 4 * 8) + kBelow<C>;
      const float v = scale.scale * static_cast<float>(number - scale.zero);
      values[k] = minimum ? v + scale.minimum : v;
    }
    op.store(i, col, values, count);
  }
}

template <class Op>
void for_each_row(const PackedMatrix& m, int64_t rows, const Queue& queue, const Op& op) {
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(m.cols, kSpanCols)),
                  static_cast<unsigned>(std::min(ceil_div(rows, kStripRows), kMostRowBlocks)));
  with_kind(m, [&](auto kind) {
    launch(rows_kernel<decltype(kind)::kCodes, Op>, grid, kThreads, 0, queue, m, rows, op);
  });
}

template <DType D>
struct Expand {
  int64_t first_row;
  Store<D>* y;
  int64_t cols;
  __device__ int64_t row(int64_t i) const { return first_row + i; }
  __device__ void store(int64_t i, int64_t col, const float (&v)[kBlockCols], int count) const {
    Store<D>* to = y + i * cols + col;
    if (cols % kPiece == 0) {  // pieces of 16 bytes are aligned and whole
#pragma unroll
      for (int k = 0; k < static_cast<int>(kBlockCols); k += kPiece) {
        if (k < count) {
          const auto pair = [&](int at) {
            return unsigned{narrowed<D>(v[k + at])} | unsigned{narrowed<D>(v[k + at + 1])} << 16;
          };
          *reinterpret_cast<uint4*>(to + k) = make_uint4(pair(0), pair(2), pair(4), pair(6));
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < static_cast<int>(kBlockCols); ++k) {
        if (k < count) to[k] = narrowed<D>(v[k]);
      }
    }
  }
};

// kAdd: to what is there.
template <bool kAdd>
struct Gather {
  const int32_t* indices;
  int64_t offset;
  float* out;
  int64_t width;
  float scale;
  __device__ int64_t row(int64_t i) const { return indices[i] + offset; }
  __device__ void store(int64_t i, int64_t col, const float (&v)[kBlockCols], int count) const {
    float* to = out + i * width + col;
#pragma unroll
    for (int k = 0; k < static_cast<int>(kBlockCols); ++k) {
      if (k < count) to[k] = kAdd ? to[k] + v[k] : scale * v[k];
    }
  }
};

}  // namespace

void expand(const ExpandArgs& args, const Queue& queue) {
  const auto as = [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for_each_row(args.w, args.rows, queue,
                 Expand<D>{args.first_row, static_cast<Store<D>*>(args.y), args.w.cols});
  };
  if (args.dtype == DType::kF16) return as(std::integral_constant<DType, DType::kF16>{});
  as(std::integral_constant<DType, DType::kBF16>{});
}

void packed_embedding(const PackedMatrix& table, float scale, float* out, int64_t tokens,
                      const StepTables& step, const Queue& queue) {
  for_each_row(table, tokens, queue, Gather<false>{step.token_ids, 0, out, table.cols, scale});
}

void packed_position_embedding(const PackedMatrix& table, int64_t offset, float* out,
                               int64_t tokens, const StepTables& step, const Queue& queue) {
  for_each_row(table, tokens, queue, Gather<true>{step.positions, offset, out, table.cols, 1});
}

}  // namespace helm::cuda
