// Attention of runs of several tokens in tensor cores, over pages of f16 or bf16.
//
// A block has kRows consecutive rows (query i, head g of one KV head, row i * group + g) of one
// run, sixteen for each warp, and walks the keys in tiles. K and V of a tile have a buffer each,
// as stored: while one is multiplied, the other arrives. Queries are two numbers of the pool's
// dtype, q = high + low, so that scores are as exact as in f32. Softmax weights are one.
#include "attention.cuh"
#include "tensor_core.h"

namespace helm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16 * kThreads / kWarp;
constexpr int kLaneRows = 2;  // of a lane's fragments, eight apart
constexpr int kF16Compute = 75;
constexpr int kMatrix = 8;  // rows and columns that one load of a fragment takes

#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__;
#else
constexpr int kArch = 0;
#endif
// Steps whose high queries are in shared memory, where registers do not suffice.
constexpr int kMostKeptHigh = 7, kKeptSteps = kArch < 800 ? kMostKeptHigh : 4;
// Whether results find the thread, or the block's RowTile, anew, as registers cannot hold them.
constexpr bool kThreadAgain = kArch < 800 || kArch >= 1200;
template <int H>
constexpr bool kRowsAgain = kThreadAgain || (kArch < 900 && H > 128);

// Shared memory of a block for head_dim <= H.
template <int H>
struct Tile {
  static constexpr int kKeys = H > 128 ? 16 : 64;
  static constexpr int kSteps = H / 16;  // of a product along the head
  // Where registers do not suffice, each thread keeps parts of its queries here: the high ones of
  // the last steps and all low ones.
  static constexpr int kKeptHigh = H > 128 ? kKeptSteps : 0, kKeptLow = H > 128 ? kSteps : 0;
  static constexpr int kKept = kKeptHigh + kKeptLow;

  uint16_t k[kKeys * H];
  uint16_t v[kKeys * H];
  uint4 queries[kKept > 0 ? kMostKeptHigh + kKeptLow : 1][kThreads];  // high, then low
  const uint16_t* rows[2][kKeys];                // of K in the pages, for two tiles in turn
  int first_token, first_row, row_count, group;  // of the block's RowTile, for results

  // Rows are cut in pieces of 16 bytes, which trade places so that eight rows, read at the same
  // columns, lie in different banks.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * H + (piece ^ row % kMatrix) * kPiece;
  }
};

// A weight is at most 2 to this power: f16 has no numbers for small ones, half of those it has are
// above 1.
template <DType D>
inline constexpr float kWeightLog2 = D == DType::kF16 ? 15.0f : 0.0f;

template <DType D>
__device__ __forceinline__ unsigned pair(float x, float y) {
  if constexpr (D == DType::kF16) {
    return pair_f16(x, y);
  } else {
    return pair_bf16(x, y);
  }
}
// What exceeds f16 becomes its largest number, as in narrowed().
template <DType D>
__device__ __forceinline__ float limited(float x) {
  if constexpr (D == DType::kF16) return x > kMostF16 ? kMostF16 : x < -kMostF16 ? -kMostF16 : x;
  return x;
}
template <DType D>
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  if constexpr (D == DType::kF16) {
    multiply_f16(c, a, b0, b1);
  } else {
    multiply_bf16(c, a, b0, b1);
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// What a thread holds of its warp's queries: fragments a of each step, times scale and log2(e).
template <DType D, int H>
struct Queries {
  static constexpr int kSteps = Tile<H>::kSteps, kHigh = kSteps - Tile<H>::kKeptHigh;
  static constexpr int kLow = kSteps - Tile<H>::kKeptLow;
  unsigned high[kHigh][4];
  unsigned low[kLow > 0 ? kLow : 1][4];

  // rows: the query's elements for each of the lane's rows, or null, which is zeros
  __device__ __forceinline__ void load(const float* const (&rows)[kLaneRows], float scale,
                                       int head_dim, Tile<H>* tile) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned whole[4], rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* row = rows[i % 2];
        const int d = step * 16 + i / 2 * kMatrix + first;
        const bool exists = row != nullptr && d < head_dim;  // an even number
        const float x = exists ? row[d] * scale : 0.0f, y = exists ? row[d + 1] * scale : 0.0f;
        whole[i] = pair<D>(limited<D>(x), limited<D>(y));
        rest[i] = pair<D>(limited<D>(x - widen<D>(static_cast<uint16_t>(whole[i]))),
                          limited<D>(y - widen<D>(static_cast<uint16_t>(whole[i] >> 16))));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (step < kHigh) high[step][i] = whole[i];
        if (step < kLow) low[step][i] = rest[i];
      }
      if (step >= kHigh) keep(whole, step - kHigh, tile);
      if (step >= kLow) keep(rest, Tile<H>::kKeptHigh + step - kLow, tile);
    }
  }

  __device__ __forceinline__ void get(int step, const Tile<H>& tile, unsigned (&whole)[4],
                                      unsigned (&rest)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (step < kHigh) whole[i] = high[step][i];
      if (step < kLow) rest[i] = low[step][i];
    }
    if (step >= kHigh) kept(step - kHigh, tile, whole);
    if (step >= kLow) kept(Tile<H>::kKeptHigh + step - kLow, tile, rest);
  }

 private:
  static __device__ __forceinline__ void keep(const unsigned (&from)[4], int place, Tile<H>* tile) {
    tile->queries[place][threadIdx.x] = make_uint4(from[0], from[1], from[2], from[3]);
  }
  static __device__ __forceinline__ void kept(int place, const Tile<H>& tile, unsigned (&to)[4]) {
    const uint4 found = tile.queries[place][threadIdx.x];
    to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
  }
};

// The thread. Places in a tile are found anew for each where no registers are left to keep them in.
template <int H>
__device__ __forceinline__ int thread_of() {
  const auto thread = static_cast<int>(threadIdx.x);
  return Tile<H>::kKept > 0 ? unknown(thread) : thread;
}

// Begins to copy K or V of a tile's rows, `offset` elements after those of K.
template <int H>
__device__ __forceinline__ void copy_rows(const uint16_t* const* rows, int64_t offset, int head_dim,
                                          uint16_t* to) {
  constexpr int kPieces = H / kPiece, kAtOnce = kThreads / kPieces;
  const int thread = thread_of<H>(), piece = thread % kPieces, first = thread / kPieces;
  if (piece * kPiece < head_dim) {
#pragma unroll
    for (int row = 0; row < Tile<H>::kKeys; row += kAtOnce) {
      copy_async(to + Tile<H>::place(row + first, piece),
                 rows[row + first] + offset + piece * kPiece);
    }
  }
  commit_copies();
}

// Zeros beyond head_dim, which no copy touches.
template <int H>
__device__ __forceinline__ void clear_rest(int head_dim, Tile<H>* tile) {
  constexpr int kPieces = H / kPiece;
  for (int i = static_cast<int>(threadIdx.x); i < Tile<H>::kKeys * kPieces; i += kThreads) {
    if (i % kPieces * kPiece < head_dim) continue;
    const int at = Tile<H>::place(i / kPieces, i % kPieces);
    *reinterpret_cast<uint4*>(tile->k + at) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(tile->v + at) = make_uint4(0, 0, 0, 0);
  }
}

// s(:, n) = q . k(n), keys n in eights
template <DType D, int H>
__device__ __forceinline__ void multiply_qk(const Queries<D, H>& q, const Tile<H>& tile,
                                            float (&s)[Tile<H>::kKeys / kMatrix][4]) {
  const int lane = thread_of<H>() % kWarp, turn = lane % kMatrix;
  const uint16_t* row = tile.k + (lane / 16 * kMatrix + turn) * H;
#pragma unroll
  for (int step = 0; step < H / 16; ++step) {
    unsigned high[4], low[4];
    q.get(step, tile, high, low);
    const int piece = (2 * step + lane / kMatrix % 2) ^ turn;
#pragma unroll
    for (int n = 0; n < Tile<H>::kKeys / kMatrix; n += 2) {
      unsigned k[4];
      load_matrices(k, row + n * kMatrix * H + piece * kPiece);
      multiply<D>(s[n], high, k[0], k[1]);
      multiply<D>(s[n + 1], high, k[2], k[3]);
      multiply<D>(s[n], low, k[0], k[1]);
      multiply<D>(s[n + 1], low, k[2], k[3]);
    }
  }
}

// o(:, c) += p v(:, c), columns c in eights
template <DType D, int H>
__device__ __forceinline__ void multiply_pv(const float (&p)[Tile<H>::kKeys / kMatrix][4],
                                            const Tile<H>& tile, float (&o)[H / kMatrix][4]) {
  const int lane = thread_of<H>() % kWarp, turn = lane % kMatrix;
  const uint16_t* row = tile.v + (lane / kMatrix % 2 * kMatrix + turn) * H;
#pragma unroll
  for (int n = 0; n < Tile<H>::kKeys / kMatrix; n += 2) {
    const unsigned weights[4] = {pair<D>(p[n][0], p[n][1]), pair<D>(p[n][2], p[n][3]),
                                 pair<D>(p[n + 1][0], p[n + 1][1]),
                                 pair<D>(p[n + 1][2], p[n + 1][3])};
#pragma unroll
    for (int c = 0; c < H / kMatrix; c += 2) {
      unsigned v[4];
      load_matrices_transposed(v, row + n * kMatrix * H + ((c + lane / 16) ^ turn) * kPiece);
      multiply<D>(o[c], weights, v[0], v[1]);
      multiply<D>(o[c + 1], weights, v[2], v[3]);
    }
  }
}

template <DType D, int H>
__global__ void __launch_bounds__(kThreads, H <= 64 ? 3 : 2)
    prompt_kernel(const AttentionArgs a, const StepTables step) {
  constexpr int kKeys = Tile<H>::kKeys, N = kKeys / kMatrix, C = H / kMatrix;
  Tile<H>& tile = *dynamic_shared<Tile<H>>();
  const int group = static_cast<int>(a.heads) / static_cast<int>(a.kv.kv_heads);
  const int64_t kv_head = blockIdx.y;
  const auto head_dim = static_cast<int>(a.kv.head_dim);
  const RowTile<kRows> rows(a, step, group);
  if (rows.rows == 0) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int row = thread / kWarp * 16 + lane / 4;  // and eight rows on
  const RunPages pages(step, rows.run, a.layer);
  const int32_t lowest = rows.position(0, group), highest = rows.position(rows.rows - 1, group);
  const KeyRange range = keys_of_split(a, rows.run, lowest, highest);

  int32_t query[kLaneRows];  // position, or -1 for no row, which sees nothing
  Queries<D, H> q;
  {
    const float* from[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int of_run = rows.first_row + row + 8 * r, token = of_run / group;
      const bool exists = row + 8 * r < rows.rows;
      query[r] = exists ? rows.run.first_position + token : -1;
      from[r] = exists ? a.x + (rows.run.first_row + token) * a.width + a.q_offset +
                             (kv_head * group + of_run - token * group) * head_dim
                       : nullptr;
    }
    q.load(from, a.scale * kLog2E, head_dim, &tile);
  }
  const auto find_rows = [&](int32_t first, int turn) {  // those past the end: the last, masked
    if (thread < kKeys) {
      tile.rows[turn][thread] =
          key_row<D>(a.kv, pages, kv_head, min(first + thread, range.end - 1));
    }
  };
  if (head_dim < H) clear_rest<H>(head_dim, &tile);

  float m[kLaneRows] = {kMinusInf, kMinusInf}, sum[kLaneRows] = {};  // over this lane's keys
  float o[C][4] = {};
  if (kRowsAgain<H> && thread == 0) {
    tile.first_token = rows.run.first_row, tile.first_row = rows.first_row;
    tile.row_count = rows.rows, tile.group = group;
  }
  if (range.begin < range.end) {
    find_rows(range.begin, 0);
    __syncthreads();
    copy_rows<H>(tile.rows[0], 0, head_dim, tile.k);
  } else if (kRowsAgain<H>) {
    __syncthreads();
  }
  int turn = 0;
  for (int32_t first = range.begin; first < range.end; first += kKeys, turn ^= 1) {
    await_copies<0>();
    __syncthreads();  // K is there, V has been read
    copy_rows<H>(tile.rows[turn], value_offset(a.kv), head_dim, tile.v);
    const bool last = first + kKeys >= range.end;
    if (!last) find_rows(first + kKeys, turn ^ 1);
    float p[N][4] = {};
    multiply_qk<D, H>(q, tile, p);
    const bool all_visible = first + kKeys <= range.end && first + kKeys - 1 <= lowest &&
                             (a.window == 0 || highest - first < a.window);
    if (!all_visible) {
      const int column = (kThreadAgain ? thread_of<H>() : lane) % 4 * 2;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t key = first + n * kMatrix + column + i % 2;
          if (key >= range.end || !visible(query[i / 2], key, a.window)) p[n][i] = kMinusInf;
        }
      }
    }
    float factor[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float top = m[r];
#pragma unroll
      for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(p[n][2 * r], p[n][2 * r + 1]));
      top = quad_max(top);
      factor[r] = exp2_fast(m[r] - shift_of(top));
      m[r] = top;
      const float shift = shift_of(top) - kWeightLog2<D>;
      float more = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          p[n][i] = exp2_fast(p[n][i] - shift);
          more += p[n][i];
        }
      }
      sum[r] = fmaf(sum[r], factor[r], more);
    }
    if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[c][i] *= factor[i / 2];
      }
    }
    await_copies<0>();
    __syncthreads();  // V is there, K has been read
    if (!last) copy_rows<H>(tile.rows[turn ^ 1], 0, head_dim, tile.k);
    multiply_pv<D, H>(p, tile, o);
  }

#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    const float natural = exp2_fast(-kWeightLog2<D>), s = quad_sum(sum[r]) * natural;
    const int again = kThreadAgain ? unknown(static_cast<int>(threadIdx.x)) : thread;
    const int quarter = (kThreadAgain ? again : lane) % 4,
              group_again = kRowsAgain<H> ? tile.group : group;
    const int of_tile = (kThreadAgain ? again / kWarp * 16 + again % kWarp / 4 : row) + 8 * r;
    const bool exists = of_tile < (kRowsAgain<H> ? tile.row_count : rows.rows);
    const int of_run = (kRowsAgain<H> ? tile.first_row : rows.first_row) + of_tile;
    const int query_of_run = of_run / group_again;
    const int64_t token = (kRowsAgain<H> ? tile.first_token : rows.run.first_row) + query_of_run;
    const int64_t head = int64_t{blockIdx.y} * group_again + of_run - query_of_run * group_again;
    ResultRow to(a, token, head, token, a.tokens);
    to.take(exists ? to.held() : Sums{kMinusInf, 0}, {m[r], s});
    __syncwarp();  // all lanes have read what is held
    if (!exists) continue;
    if (quarter == 0) to.store_sums();
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = c * kMatrix + quarter * 2 + i;
        if (d < head_dim) to.store(d, o[c][2 * r + i] * natural);
      }
    }
  }
}

template <DType D, int H>
void launch_prompt(const AttentionArgs& a, const StepTables& step, cudaStream_t stream) {
  if constexpr (sizeof(Tile<H>) > 48 << 10) {  // what a kernel may use without asking
    cudaFuncSetAttribute(prompt_kernel<D, H>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(sizeof(Tile<H>)));
  }
  launch(prompt_kernel<D, H>, prompt_grid(a, kRows), kThreads, sizeof(Tile<H>), stream, a, step);
}

template <DType D>
void choose_size(const AttentionArgs& a, const StepTables& step, cudaStream_t stream) {
  if (a.kv.head_dim <= 64) {
    launch_prompt<D, 64>(a, step, stream);
  } else if (a.kv.head_dim <= 128) {
    launch_prompt<D, 128>(a, step, stream);
  } else {
    launch_prompt<D, kMaxHeadDim>(a, step, stream);
  }
}

}  // namespace

bool in_tensor_cores(const AttentionArgs& args) {
  const int oldest = args.kv.dtype == DType::kF16    ? kF16Compute
                     : args.kv.dtype == DType::kBF16 ? kBf16Compute
                                                     : std::numeric_limits<int>::max();
  return args.compute >= oldest && vector_rows(args.kv) && args.softcap == 0;
}

void attention_prompt(const AttentionArgs& args, const StepTables& step, cudaStream_t stream) {
  if (args.kv.dtype == DType::kF16) {
    choose_size<DType::kF16>(args, step, stream);
  } else {
    choose_size<DType::kBF16>(args, step, stream);
  }
}

}  // namespace helm::cuda
