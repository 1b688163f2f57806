// Attention of runs of one token, bound by reading K and V once.
//
// A block has one run, one split and up to G query heads of one KV head. kLanes lanes of a warp
// share a key, eight elements each, and keep their own running (m, s, o) in registers: warps meet
// only at the end, so that loads never wait for other warps.
#include "attention.cuh"

namespace helm::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
// Sixteen-byte loads of K, and of V, that a lane has in flight. Beside eight query heads registers
// hold two: with two blocks those are 16 KiB per multiprocessor, above an H100's latency times its
// share of the bandwidth.
// For sm_120 the compiler takes more registers; its multiprocessors have less than half of an
// H100's bandwidth, so that two loads suffice.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif
template <int G>
constexpr int kLoads = G == 8 || (kFewRegisters && G != 2) ? 2 : 4;

// Running softmax of one query head over the keys that one group of lanes has seen.
struct Running {
  float m = kMinusInf;
  float s = 0;           // over the keys whose weights this lane computed
  float o[kPiece] = {};  // this lane's elements

  // Moves the maximum to at least `top` and returns the value to subtract from scores.
  __device__ __forceinline__ float raise(float top) {
    const float raised = fmaxf(m, top), shift = shift_of(raised);
    const float factor = exp2_fast(m - shift);
    m = raised;
    s *= factor;
#pragma unroll
    for (float& v : o) v *= factor;
    return shift;
  }

  // Adds what the lane at distance `step` has; it does the same.
  __device__ __forceinline__ void merge_lanes(int step) {
    raise(__shfl_xor_sync(kAllLanes, m, step));
    s += __shfl_xor_sync(kAllLanes, s, step);
#pragma unroll
    for (float& v : o) v += __shfl_xor_sync(kAllLanes, v, step);
  }
};

// Sums of U numbers each over kLanes lanes: lane l is given the sum of number l / (kLanes / U). A
// lane hands on half of its numbers and keeps the others, so that each step has half as many to
// add.
template <int kLanes, int U>
__device__ __forceinline__ float reduce_scatter(float (&x)[U], int lane) {
  static_assert((U & (U - 1)) == 0 && U <= kLanes);
  int step = kLanes / 2;
#pragma unroll
  for (int n = U / 2; n > 0; n /= 2, step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float given = upper ? x[i] : x[n + i], kept = upper ? x[n + i] : x[i];
      x[i] = kept + __shfl_xor_sync(kAllLanes, given, step);
    }
  }
  float sum = x[0];
#pragma unroll
  for (int s = kLanes / U / 2; s > 0; s /= 2) sum += __shfl_xor_sync(kAllLanes, sum, s);
  return sum;
}

// Results of the warps of a block, and what their rows hold before.
template <int kLanes, int G>
struct Meeting {
  Sums held[G];
  float m[kWarps][G], s[kWarps][G];
  float o[kWarps][G][kLanes * kPiece];
};

template <int kLanes, int G>
__device__ void write_rows(const AttentionArgs& a, const Meeting<kLanes, G>& meeting, int64_t token,
                           int64_t first_head, int heads) {
  const auto head_dim = static_cast<int>(a.kv.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < heads * head_dim; i += kThreads) {
    const int g = i / head_dim, d = i - g * head_dim;
    float m = kMinusInf, s = 0, o = 0;
    for (int w = 0; w < kWarps; ++w) m = fmaxf(m, meeting.m[w][g]);
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_fast(meeting.m[w][g] - shift_of(m));
      s = fmaf(meeting.s[w][g], weight, s);
      o = fmaf(meeting.o[w][g][d], weight, o);
    }
    ResultRow row(a, token, first_head + g, blockIdx.x, a.runs);
    row.take(meeting.held[g], {m, s});
    row.store(d, o);
    if (d == 0) row.store_sums();
  }
}

// decode_residents: what a multiprocessor's registers are to hold. Left to itself the compiler may
// give the few instructions after the loop so many that fewer blocks load.
template <DType D, int kLanes, int G, bool kVector>
__global__ void __launch_bounds__(kThreads, decode_residents(G) - (kVector ? 0 : 1))
    decode_kernel(const AttentionArgs a, const StepTables step) {
  let_next_begin();
  constexpr int kKeys = kWarp / kLanes;                                   // per load of a warp
  constexpr int U = kLoads<G> / static_cast<int>(sizeof(Piece<D>) / 16);  // loads at once
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first_dim = lane % kLanes * kPiece;
  const int64_t dims = a.kv.head_dim - first_dim;  // of this lane; may be negative
  const auto group = static_cast<int>(a.heads / a.kv.kv_heads);
  const int tiles = (group + G - 1) / G, tile = static_cast<int>(blockIdx.y) % tiles;
  const int64_t kv_head = static_cast<int>(blockIdx.y) / tiles;
  const int heads = min(G, group - tile * G);
  const int64_t first_head = kv_head * group + tile * G;

  await_previous();
  const Run run = step.runs[blockIdx.x];
  if (run.tokens != 1) return;
  const RunPages pages(step, run, a.layer);
  const KeyRange range = keys_of_split(a, run, run.first_position, run.first_position);

  float q[G][kPiece];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    const float* from =
        a.x + run.first_row * a.width + a.q_offset + (first_head + g) * a.kv.head_dim + first_dim;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      q[g][i] = g < heads && i < dims ? from[i] * (a.scale * kLog2E) : 0.0f;
    }
  }

  Running running[G];
  constexpr int kStride = kKeys * U;  // keys of a warp per round
  for (int32_t first = range.begin + warp * kStride; first < range.end; first += kWarps * kStride) {
    Piece<D> k[U], v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int32_t key = first + u * kKeys + lane / kLanes;
      const int64_t count = key < range.end ? dims : 0;
      const Store<D>* row = key_row<D>(a.kv, pages, kv_head, min(key, range.end - 1)) + first_dim;
      k[u] = load_piece<D, kVector>(row, count);
      v[u] = load_piece<D, kVector>(row + value_offset(a.kv), count);
    }
    // The key whose score this lane comes to hold.
    const bool own_exists =
        first + lane % kLanes / (kLanes / U) * kKeys + lane / kLanes < range.end;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float sums[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        sums[u] = 0;
#pragma unroll
        for (int i = 0; i < kPiece; ++i) sums[u] = fmaf(q[g][i], k[u][i], sums[u]);
      }
      const float sum = reduce_scatter<kLanes>(sums, lane);
      const float score = own_exists ? capped(a, sum) : kMinusInf;
      float top = score;
#pragma unroll
      for (int s = kLanes / 2; s >= kLanes / U; s /= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, s));
      }
      const float own_weight = exp2_fast(score - running[g].raise(top));
      running[g].s += own_weight;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const float weight = __shfl_sync(kAllLanes, own_weight, u * (kLanes / U), kLanes);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          running[g].o[i] = fmaf(weight, v[u][i], running[g].o[i]);
        }
      }
    }
  }

  __shared__ Meeting<kLanes, G> meeting;
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int s = kLanes / 2; s >= kLanes / U; s /= 2) {
      running[g].s += __shfl_xor_sync(kAllLanes, running[g].s, s);
    }
#pragma unroll
    for (int s = kLanes; s < kWarp; s *= 2) running[g].merge_lanes(s);
    if (lane >= kLanes) continue;
    if (lane == 0) meeting.m[warp][g] = running[g].m, meeting.s[warp][g] = running[g].s;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) meeting.o[warp][g][first_dim + i] = running[g].o[i];
  }
  if (const auto g = static_cast<int>(threadIdx.x); g < heads) {
    meeting.held[g] = ResultRow(a, run.first_row, first_head + g, blockIdx.x, a.runs).held();
  }
  __syncthreads();
  write_rows<kLanes, G>(a, meeting, run.first_row, first_head, heads);
}

template <DType D, int kLanes, int G, bool kVector>
void launch_decode(const AttentionArgs& a, const StepTables& step, const Queue& queue) {
  const int64_t tiles = ceil_div(a.heads / a.kv.kv_heads, G);
  launch(decode_kernel<D, kLanes, G, kVector>,
         dim3(static_cast<unsigned>(a.runs), static_cast<unsigned>(a.kv.kv_heads * tiles),
              static_cast<unsigned>(a.decode_splits)),
         kThreads, 0, queue, a, step);
}

// f32 has fewer variants: a pool is f32 in tests and on request only.
template <DType D, int kLanes>
void launch_group(const AttentionArgs& a, const StepTables& step, const Queue& queue) {
  const int64_t group = a.heads / a.kv.kv_heads;
  if (group == 1) {
    launch_decode<D, kLanes, 1, true>(a, step, queue);
  } else if constexpr (D == DType::kF32) {
    launch_decode<D, kLanes, 4, true>(a, step, queue);
  } else if (group == 2) {
    launch_decode<D, kLanes, 2, true>(a, step, queue);
  } else if (group <= 4) {
    launch_decode<D, kLanes, 4, true>(a, step, queue);
  } else {
    launch_decode<D, kLanes, 8, true>(a, step, queue);
  }
}

}  // namespace

void attention_decode(const AttentionArgs& args, const StepTables& step, const Queue& queue) {
  with_dtype(args.kv.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    if (!vector_rows(args.kv)) {
      launch_decode<D, 32, 1, false>(args, step, queue);
    } else if (args.kv.head_dim <= 8 * kPiece) {
      launch_group<D, 8>(args, step, queue);
    } else if (args.kv.head_dim <= 16 * kPiece) {
      launch_group<D, 16>(args, step, queue);
    } else {
      launch_group<D, 32>(args, step, queue);
    }
  });
}

}  // namespace helm::cuda
