// Attention of runs of several tokens in f32, for all pages that attention_prompt.cu does not take.
//
// A block has kRows consecutive rows (query i, head g of one KV head, row i * group + g) of one
// run, so that query heads share K and V, and walks the keys in tiles that pass through shared
// memory. Sixteen lanes share four rows: each has every sixteenth key of S and of V's columns four
// in a row.
#include "attention.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = static_cast<int>(kPromptRows);
constexpr int kRowLanes = 16;  // lanes that share rows
constexpr int kLaneRows = kRows / (kThreads / kRowLanes);
constexpr int kPad = 4;  // floats after each row: rows start four banks apart, on 16 bytes

// Shared memory of a block for head_dim <= H.
template <int H>
struct Tile {
  static constexpr int kKeys = H > 128 ? 16 : 32;  // within 64 KiB, all that sm_75 has
  float q[kRows][H + kPad];
  float kv[kKeys][H + kPad];  // K, then V
  float p[kRows][kKeys + kPad];
};

__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int s = kRowLanes / 2; s > 0; s /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, s));
  return x;
}
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int s = kRowLanes / 2; s > 0; s /= 2) x += __shfl_xor_sync(kAllLanes, x, s);
  return x;
}

__device__ __forceinline__ const float4& as_float4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

// scale * q of the block's rows, zeros elsewhere.
template <int H>
__device__ void load_queries(const AttentionArgs& a, const RowTile<kRows>& rows, int group,
                             int64_t kv_head, Tile<H>* tile) {
  const auto head_dim = static_cast<int>(a.kv.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * H; i += kThreads) {
    const int r = i / H, d = i % H;
    float v = 0;
    if (r < rows.rows && d < head_dim) {
      const int row = rows.first_row + r, token = row / group, g = row - token * group;
      v = a.x[(rows.run.first_row + token) * a.width + a.q_offset +
              (kv_head * group + g) * head_dim + d] *
          (a.scale * kLog2E);
    }
    tile->q[r][d] = v;
  }
}

// K or V of positions [first, end), zeros after them and beyond head_dim.
template <DType D, int H, bool kVector>
__device__ void load_tile(const AttentionArgs& a, const RunPages& pages, int64_t kv_head,
                          int64_t offset, int32_t first, int32_t end, Tile<H>* tile) {
  constexpr int kPieces = H / kPiece;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < Tile<H>::kKeys * kPieces; i += kThreads) {
    const int j = i / kPieces, d = i % kPieces * kPiece;
    const int32_t key = min(first + j, end - 1);
    const int64_t count = first + j < end ? a.kv.head_dim - d : 0;
    const Piece<D> piece =
        load_piece<D, kVector>(key_row<D>(a.kv, pages, kv_head, key) + offset + d, count);
#pragma unroll
    for (int n = 0; n < kPiece; n += 4) {
      *reinterpret_cast<float4*>(&tile->kv[j][d + n]) =
          make_float4(piece[n], piece[n + 1], piece[n + 2], piece[n + 3]);
    }
  }
}

// s(r, n) = q(row + r) . k(lane + 16 n)
template <int H, int N>
__device__ __forceinline__ void multiply_qk(const Tile<H>& tile, int head_dim, int row, int lane,
                                            float (&s)[kLaneRows][N]) {
#pragma unroll 4
  for (int d = 0; d < head_dim; d += 4) {
    float4 k[N];
#pragma unroll
    for (int n = 0; n < N; ++n) k[n] = as_float4(&tile.kv[lane + kRowLanes * n][d]);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float4 q = as_float4(&tile.q[row + r][d]);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        s[r][n] = fmaf(q.x, k[n].x, fmaf(q.y, k[n].y, s[r][n]));
        s[r][n] = fmaf(q.z, k[n].z, fmaf(q.w, k[n].w, s[r][n]));
      }
    }
  }
}

// o(r, c) += sum_j p(row + r, j) v(j, 4 lane + 64 c + ...)
template <int H, int C>
__device__ __forceinline__ void multiply_pv(const Tile<H>& tile, int row, int lane,
                                            float4 (&o)[kLaneRows][C]) {
#pragma unroll 2
  for (int j = 0; j < Tile<H>::kKeys; j += 4) {
    float p[kLaneRows][4];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float4 x = as_float4(&tile.p[row + r][j]);
      p[r][0] = x.x, p[r][1] = x.y, p[r][2] = x.z, p[r][3] = x.w;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const float4 v = as_float4(&tile.kv[j + n][4 * lane + 4 * kRowLanes * c]);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          o[r][c].x = fmaf(p[r][n], v.x, o[r][c].x);
          o[r][c].y = fmaf(p[r][n], v.y, o[r][c].y);
          o[r][c].z = fmaf(p[r][n], v.z, o[r][c].z);
          o[r][c].w = fmaf(p[r][n], v.w, o[r][c].w);
        }
      }
    }
  }
}

template <DType D, int H, bool kVector>
__global__ void __launch_bounds__(kThreads)
    prefill_kernel(const AttentionArgs a, const StepTables step) {
  constexpr int kKeys = Tile<H>::kKeys, N = kKeys / kRowLanes, C = H / (4 * kRowLanes);
  Tile<H>& tile = *dynamic_shared<Tile<H>>();
  const int group = static_cast<int>(a.heads) / static_cast<int>(a.kv.kv_heads);
  const int64_t kv_head = blockIdx.y;
  const auto head_dim = static_cast<int>(a.kv.head_dim);
  const RowTile<kRows> rows(a, step, group);
  if (rows.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int row = static_cast<int>(threadIdx.x) / kRowLanes * kLaneRows;
  const RunPages pages(step, rows.run, a.layer);
  const auto position_of = [&](int r) { return rows.position(r, group); };
  const KeyRange range = keys_of_split(a, rows.run, position_of(0), position_of(rows.rows - 1));

  load_queries(a, rows, group, kv_head, &tile);
  float m[kLaneRows], s[kLaneRows] = {};  // s: over this lane's keys
  float4 o[kLaneRows][C] = {};
  int32_t query[kLaneRows];  // position, or -1 for no row, which sees nothing
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    m[r] = kMinusInf;
    query[r] = row + r < rows.rows ? position_of(row + r) : -1;
  }

  for (int32_t first = range.begin; first < range.end; first += kKeys) {
    __syncthreads();
    load_tile<D, H, kVector>(a, pages, kv_head, 0, first, range.end, &tile);
    __syncthreads();
    float p[kLaneRows][N] = {};
    multiply_qk<H, N>(tile, head_dim, row, lane, p);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float top = m[r];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int32_t key = first + lane + kRowLanes * n;
        const bool seen = key < range.end && visible(query[r], key, a.window);
        p[r][n] = seen ? capped(a, p[r][n]) : kMinusInf;
        top = fmaxf(top, p[r][n]);
      }
      top = lanes_max(top);
      const float shift = shift_of(top), factor = exp2_fast(m[r] - shift);
      m[r] = top;
      s[r] *= factor;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        p[r][n] = exp2_fast(p[r][n] - shift);
        s[r] += p[r][n];
        tile.p[row + r][lane + kRowLanes * n] = p[r][n];
      }
#pragma unroll
      for (float4& v : o[r]) v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
    }
    __syncthreads();
    load_tile<D, H, kVector>(a, pages, kv_head, value_offset(a.kv), first, range.end, &tile);
    __syncthreads();
    multiply_pv<H, C>(tile, row, lane, o);
  }

#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    s[r] = lanes_sum(s[r]);
    const bool exists = row + r < rows.rows;
    const int of_run = rows.first_row + row + r, query_of_run = of_run / group;
    const int64_t token = rows.run.first_row + query_of_run;
    ResultRow to(a, token, kv_head * group + of_run - query_of_run * group, token, a.tokens);
    to.take(exists ? to.held() : Sums{kMinusInf, 0}, {m[r], s[r]});
    __syncwarp();  // all lanes have read what is held
    if (!exists) continue;
    if (lane == 0) to.store_sums();
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const float v[4] = {o[r][c].x, o[r][c].y, o[r][c].z, o[r][c].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = 4 * lane + 4 * kRowLanes * c + i;
        if (d < head_dim) to.store(d, v[i]);
      }
    }
  }
}

template <DType D, int H, bool kVector>
void launch_prefill(const AttentionArgs& a, const StepTables& step, cudaStream_t stream) {
  if constexpr (sizeof(Tile<H>) > 48 << 10) {  // what a kernel may use without asking
    cudaFuncSetAttribute(prefill_kernel<D, H, kVector>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(sizeof(Tile<H>)));
  }
  launch(prefill_kernel<D, H, kVector>, prompt_grid(a, kRows), kThreads, sizeof(Tile<H>), stream, a,
         step);
}

}  // namespace

void attention_prefill(const AttentionArgs& args, const StepTables& step, cudaStream_t stream) {
  with_dtype(args.kv.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    if (!vector_rows(args.kv)) {
      launch_prefill<D, kMaxHeadDim, false>(args, step, stream);
    } else if (args.kv.head_dim <= 64) {
      launch_prefill<D, 64, true>(args, step, stream);
    } else if (args.kv.head_dim <= 128) {
      launch_prefill<D, 128, true>(args, step, stream);
    } else {
      launch_prefill<D, kMaxHeadDim, true>(args, step, stream);
    }
  });
}

}  // namespace helm::cuda
