// Products of few activation rows with a weight matrix, bound by reading the weights once.
//
// A warp owns kRows weight rows and all tokens; its lanes share the columns in pieces of 16 bytes
// and add up by shuffles. A (token, row) sums in the same order for every number of tokens.
#include "kernels.h"
#include "vec.cuh"

namespace helm::cuda {
namespace {

constexpr int kWarps = 4;  // small blocks: the last ones leave few cores idle

// Weight rows per warp: activations come from L1, which many tokens would exhaust at one row.
template <int T>
inline constexpr int kRows = T <= 2 ? 2 : 4;
// Blocks that a multiprocessor's registers are to hold. Left to itself the compiler takes more, and
// fewer weights are on their way. With so many for four and for eight tokens it spills on all GPUs
// but Hopper.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kFewer = 0;
#else
constexpr int kFewer = 1;
#endif
template <int T>
inline constexpr int kBlocks = T == 1   ? 6
                               : T == 2 ? 5
                               : T <= 4 ? 4 - kFewer
                                        : 3 - kFewer;
// Sixteen-byte loads of weights that a lane has in flight.
constexpr int kLoads = 8;

// act = A(t, p * 8 ...), the halves exchanged for lanes with `swap`: without that, lanes 4 apart
// would meet in the same banks.
__device__ __forceinline__ void load_activations(const float* a, bool swap, float* act) {
  const auto* from = reinterpret_cast<const float4*>(a);
  const float4 low = from[swap], high = from[!swap];
  act[0] = low.x, act[1] = low.y, act[2] = low.z, act[3] = low.w;
  act[4] = high.x, act[5] = high.y, act[6] = high.z, act[7] = high.w;
}

template <DType D, int T, bool kVector>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocks<T>) matvec_kernel(const MatvecArgs args) {
  constexpr int R = kRows<T>;
  constexpr int U = kLoads / R / static_cast<int>(sizeof(Piece<D>) / 16);
  let_next_begin();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int rows = static_cast<int>(args.rows);
  const int first_row =
      (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp) * R;
  if (first_row >= rows) return await_previous();

  // Rows and tokens past the end repeat the last, and are not stored. Offsets of 32 bits, from one
  // pointer each, take half the registers.
  const auto cols = static_cast<int>(args.cols);
  const auto* const w = static_cast<const Store<D>*>(args.w) + int64_t{first_row} * cols;
  int of_row[R], of_token[T];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    of_row[r] = min(r, rows - 1 - first_row) * cols;
  }
#pragma unroll
  for (int t = 0; t < T; ++t) {
    of_token[t] = min(t, static_cast<int>(args.tokens) - 1) * static_cast<int>(args.a_stride);
  }

  float sum[T][R] = {};
  const int pieces = kVector ? cols / kPiece : 0;
  const bool swap = lane & 4;
  for (int p0 = lane; p0 < pieces; p0 += kWarp * U) {
    Piece<D> weights[U][R];
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int p = p0 + kWarp * u;
        if (p < pieces) weights[u][r] = load_piece<D>(w + of_row[r] + p * kPiece);
      }
    }
    if (p0 == lane) await_previous();  // weights alone are read before
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int p = p0 + kWarp * u;
      if (p >= pieces) break;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (swap) weights[u][r] = weights[u][r].swapped();
      }
#pragma unroll
      for (int t = 0; t < T; ++t) {
        float act[kPiece];
        load_activations(args.a + of_token[t] + p * kPiece, swap, act);
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int i = 0; i < kPiece; ++i) sum[t][r] = fmaf(act[i], weights[u][r][i], sum[t][r]);
        }
      }
    }
  }
  await_previous();
#pragma unroll(T > 4 ? 1 : 2)
  for (int k = pieces * kPiece + lane; k < cols; k += kWarp) {
    float weight[R];
#pragma unroll
    for (int r = 0; r < R; ++r) weight[r] = widen<D>(__ldg(w + of_row[r] + k));
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const float act = args.a[of_token[t] + k];
#pragma unroll
      for (int r = 0; r < R; ++r) sum[t][r] = fmaf(act, weight[r], sum[t][r]);
    }
  }

  float own = 0;  // of token lane / R and row lane % R
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float total = warp_sum(sum[t][r]);
      if (lane == t * R + r) own = total;
    }
  }
  const int t = lane / R, row = first_row + lane % R;
  if (t >= args.tokens || row >= rows) return;
  float* c = args.c + t * args.c_stride + row;
  if (args.bias != nullptr) own += args.bias[row];
  *c = args.accumulate ? *c + own : own;
}

template <DType D, int T>
void launch_matvec(const MatvecArgs& args, const Queue& queue) {
  const bool vector = aligned16(args.w) && args.cols * dtype_bytes(D) % 16 == 0 &&
                      aligned16(args.a) && args.a_stride % 4 == 0;
  const auto blocks = static_cast<unsigned>(ceil_div(args.rows, kRows<T> * kWarps));
  launch(vector ? matvec_kernel<D, T, true> : matvec_kernel<D, T, false>, blocks, kWarps * kWarp, 0,
         queue, args);
}

}  // namespace

void matvec(const MatvecArgs& args, const Queue& queue) {
  if (args.rows == 0 || args.tokens == 0) return;
  with_dtype(args.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    if (args.tokens == 1) {
      launch_matvec<D, 1>(args, queue);
    } else if (args.tokens == 2) {
      launch_matvec<D, 2>(args, queue);
    } else if (args.tokens <= 4) {
      launch_matvec<D, 4>(args, queue);
    } else {
      launch_matvec<D, 8>(args, queue);
    }
  });
}

}  // namespace helm::cuda
