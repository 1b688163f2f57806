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
// Sixteen-byte loads of weights that a lane has in flight.
constexpr int kLoads = 8;

// act = A(t, p * 8 ...), the halves exchanged for lanes with `swap`: without that, lanes 4 apart
// would meet in the same banks.
__device__ __forceinline__ void load_activations(const float* a, bool swap, float* act) {
  const auto* from = reinterpret_cast<const float4*>(a);
  const float4 low = __ldg(from + swap), high = __ldg(from + !swap);
  act[0] = low.x, act[1] = low.y, act[2] = low.z, act[3] = low.w;
  act[4] = high.x, act[5] = high.y, act[6] = high.z, act[7] = high.w;
}

template <DType D, int T, bool kVector>
__global__ void __launch_bounds__(kWarps* kWarp) matvec_kernel(const MatvecArgs args) {
  constexpr int R = kRows<T>;
  constexpr int U = kLoads / R / static_cast<int>(sizeof(Piece<D>) / 16);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_row =
      (int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp) * R;
  if (first_row >= args.rows) return;

  const Store<D>* w[R];  // rows and tokens past the end repeat the last, and are not stored
#pragma unroll
  for (int r = 0; r < R; ++r) {
    w[r] = static_cast<const Store<D>*>(args.w) + min(first_row + r, args.rows - 1) * args.cols;
  }
  const float* a[T];
#pragma unroll
  for (int t = 0; t < T; ++t) {
    a[t] = args.a + min(int64_t{t}, args.tokens - 1) * args.a_stride;
  }

  float sum[T][R] = {};
  const int64_t pieces = kVector ? args.cols / kPiece : 0;
  const bool swap = lane & 4;
  for (int64_t p0 = lane; p0 < pieces; p0 += kWarp * U) {
    Piece<D> weights[U][R];
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t p = p0 + kWarp * u;
        if (p < pieces) weights[u][r] = load_piece<D>(w[r] + p * kPiece);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t p = p0 + kWarp * u;
      if (p >= pieces) break;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (swap) weights[u][r] = weights[u][r].swapped();
      }
#pragma unroll
      for (int t = 0; t < T; ++t) {
        float act[kPiece];
        load_activations(a[t] + p * kPiece, swap, act);
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int i = 0; i < kPiece; ++i) sum[t][r] = fmaf(act[i], weights[u][r][i], sum[t][r]);
        }
      }
    }
  }
#pragma unroll 2
  for (int64_t k = pieces * kPiece + lane; k < args.cols; k += kWarp) {
    float weight[R];
#pragma unroll
    for (int r = 0; r < R; ++r) weight[r] = widen<D>(__ldg(w[r] + k));
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const float act = __ldg(a[t] + k);
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
  const int64_t t = lane / R, row = first_row + lane % R;
  if (t >= args.tokens || row >= args.rows) return;
  float* c = args.c + t * args.c_stride + row;
  if (args.bias != nullptr) own += args.bias[row];
  *c = args.accumulate ? *c + own : own;
}

template <DType D, int T>
void launch_matvec(const MatvecArgs& args, cudaStream_t stream) {
  const bool vector = aligned16(args.w) && args.cols * dtype_bytes(D) % 16 == 0 &&
                      aligned16(args.a) && args.a_stride % 4 == 0;
  const auto blocks = static_cast<unsigned>(ceil_div(args.rows, kRows<T> * kWarps));
  launch(vector ? matvec_kernel<D, T, true> : matvec_kernel<D, T, false>, blocks, kWarps * kWarp, 0,
         stream, args);
}

}  // namespace

void matvec(const MatvecArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.tokens == 0) return;
  with_dtype(args.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    if (args.tokens == 1) {
      launch_matvec<D, 1>(args, stream);
    } else if (args.tokens == 2) {
      launch_matvec<D, 2>(args, stream);
    } else if (args.tokens <= 4) {
      launch_matvec<D, 4>(args, stream);
    } else {
      launch_matvec<D, 8>(args, stream);
    }
  });
}

}  // namespace helm::cuda
