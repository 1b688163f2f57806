// Products of few tokens with packed weights, bound by reading the weights once, in the CPU's order
// of sums.
//
// A block of threads owns a strip of 16 rows. Its threads sum integers, one row of a block of
// columns each, for some spans at a time; then one thread per (token, row) adds these up in order.
// The chain is short beside the loads, which other blocks of threads go on with.
#include "packed.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = kRowsOfStrip * kBlocksOfSpan;  // a span at a time
constexpr unsigned kInfinity = 0x7f800000u;
constexpr float kLeastNormal = 1.17549435e-38f;

__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    x = max(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  return x;
}

// A warp per block of columns.
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const QuantizeArgs args, int64_t blocks) {
  const int64_t index = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (index >= args.tokens * blocks) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t t = index / blocks, col = index % blocks * kBlockCols + lane;
  const float x = col < args.cols ? args.x[t * args.x_stride + col] : 0.0f;
  const unsigned size = __float_as_uint(x) & 0x7fffffffu;  // magnitudes compare as their bits do
  const unsigned largest = warp_max(size);
  const float most = __uint_as_float(largest);
  const bool far_out = size > __float_as_uint(0.5f * most);
  const unsigned above = __ballot_sync(kAllLanes, far_out);
  const bool alone = above != 0 && (above & (above - 1)) == 0;
  const float others = __uint_as_float(warp_max(far_out ? 0 : size));
  const float a = alone ? fmaxf(others, most / 127.0f) : most;
  float alpha = a / 127.0f;
  int n = 0;
  if (largest >= kInfinity) {
    alpha = NAN;
  } else if (alpha < kLeastNormal) {
    alpha = 0;
  } else {
    n = static_cast<int>(rintf(x * (127.0f / a)));
  }
  const int far = alone && far_out ? (n + 64) >> kFarShift : 0;
  int sum = n;
#pragma unroll
  for (int step = kWarp / 4; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  QuantBlock& out = args.out[index];
  out.q[lane] = static_cast<int8_t>(n - far * (1 << kFarShift));
  if (lane == 0) out.alpha = alpha;
  if (lane % 16 == 0) out.sums[lane / 16] = sum;
  if (alone ? far_out : lane == 0) {
    out.far = static_cast<int16_t>(far);
    out.far_col = static_cast<int16_t>(lane);
  }
}

// What of a block of activations the chains take.
struct BlockScale {
  float alpha;
  int sums[2];
};
__device__ __forceinline__ BlockScale load_block_scale(const QuantBlock* block) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(block) + 2);
  return {__uint_as_float(v.x), {static_cast<int>(v.y), static_cast<int>(v.z)}};
}
__device__ __forceinline__ void load_q(const QuantBlock* block, unsigned (&q)[kQuads]) {
  const auto* from = reinterpret_cast<const uint4*>(block);
  const uint4 first = __ldg(from), second = __ldg(from + 1);
  q[0] = first.x, q[1] = first.y, q[2] = first.z, q[3] = first.w;
  q[4] = second.x, q[5] = second.y, q[6] = second.z, q[7] = second.w;
}

// What n of a block has beyond a byte, in one column at most: its sum of products with numbers() of
// a half of the block, or of all of it.
template <int H>
__device__ __forceinline__ int far_sum(const QuantBlock* block, int half,
                                       const unsigned (&quads)[kQuads]) {
  const unsigned packed = __ldg(reinterpret_cast<const unsigned*>(block) + 11);
  const int far = static_cast<int16_t>(packed), col = static_cast<int>(packed >> 16);
  if (far == 0 || (H == 2 && col / 16 != half)) return 0;
  unsigned quad = quads[0];  // registers have no index
#pragma unroll
  for (int k = 1; k < kQuads; ++k) quad = col / 4 == k ? quads[k] : quad;
  return static_cast<int8_t>(quad >> col % 4 * 8) * far * (1 << kFarShift);
}

// What the chains add times the sum of activations. Like the CPU's fma, never -0 but for kM.
template <Scales S>
__device__ __forceinline__ float minimum_of(const RowScale& s) {
  if constexpr (S == Scales::kZ) return fmaf(-s.scale, static_cast<float>(s.zero), 0.0f);
  if constexpr (S == Scales::kKM) return s.minimum + 0.0f;
  return s.minimum;
}

// Of a strip and some spans of columns.
template <Scales S, int H, int T, int Blocks>
struct Chunk {
  static constexpr int kPlaces = H * Blocks * kRowsOfStrip;
  int sums[T][kPlaces + kRowsOfStrip];  // so that two tokens meet in no bank
  float scales[kPlaces];
  float minima[kHasMinimum<S> ? kPlaces : 1];

  __device__ static int place(int half, int block, int row) {
    return (half * Blocks + block) * kRowsOfStrip + row;
  }
};

template <Codes C, Scales S, bool kHalves, int T>
__global__ void __launch_bounds__(kThreads) packed_matvec_kernel(const PackedMatvecArgs args) {
  constexpr int H = kHalves ? 2 : 1;
  constexpr int kSpans = T > 1 ? 2 : 4;  // at a time
  constexpr int kBlocks = kSpans * kBlocksOfSpan;
  using Sums = Chunk<S, H, T, kBlocks>;
  __shared__ Sums chunk;
  const PackedMatrix& w = args.w;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread % kRowsOfStrip, part = thread / kRowsOfStrip;
  const int64_t strip = blockIdx.x, blocks = ceil_div(w.cols, kBlockCols);
  const auto activations = [&](int t, int64_t block) {  // tokens past the last repeat it
    return args.a + min(int64_t{t}, args.tokens - 1) * blocks + block;
  };

  const int64_t out_row = strip * kRowsOfStrip + row;
  const bool owns = part < T && part < args.tokens && out_row < w.rows;
  float* const c = args.c + part * args.c_stride + out_row;
  float sum = 0;
  if (owns && args.bias != nullptr) sum = args.bias[out_row];
  if (owns && args.accumulate) sum = args.bias == nullptr ? *c : *c + sum;

  for (int64_t first = 0; first < blocks; first += kBlocks) {
    unsigned words[kSpans][kCodeWords<C>];
    RowScale scales[kSpans][H];
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      const int64_t block = first + i * kBlocksOfSpan + part;
      if (block >= blocks) break;
      const PackedPlace at(w, strip, block);
      load_codes<C>(at.codes<C>(), row, words[i]);
#pragma unroll
      for (int h = 0; h < H; ++h) {
        scales[i][h] = read_scale<S>(w, at, at.group(w, h), row);
      }
    }
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      const int in_chunk = i * kBlocksOfSpan + part;
      if (first + in_chunk >= blocks) break;
      unsigned quads[kQuads];
      numbers<C>(words[i], quads);
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const int place = Sums::place(h, in_chunk, row);
        const RowScale& s = scales[i][h];
        chunk.scales[place] = s.scale;
        if constexpr (kHasMinimum<S>) chunk.minima[place] = minimum_of<S>(s);
      }
#pragma unroll
      for (int t = 0; t < T; ++t) {
        unsigned q[kQuads];
        load_q(activations(t, first + in_chunk), q);
#pragma unroll
        for (int h = 0; h < H; ++h) {
          int dot = far_sum<H>(activations(t, first + in_chunk), h, quads);
#pragma unroll
          for (int k = 0; k < kQuads / H; ++k) {
            dot = __dp4a(static_cast<int>(quads[h * 4 + k]), static_cast<int>(q[h * 4 + k]), dot);
          }
          chunk.sums[t][Sums::place(h, in_chunk, row)] = dot;
        }
      }
    }
    __syncthreads();
    if (part < T) {
      const int count = static_cast<int>(min(blocks - first, int64_t{kBlocks}));
#pragma unroll 4
      for (int b = 0; b < count; ++b) {
        const BlockScale x = load_block_scale(activations(part, first + b));
#pragma unroll
        for (int h = 0; h < H; ++h) {
          const int place = Sums::place(h, b, row);
          const int of_x = kHalves ? x.sums[h] : x.sums[0] + x.sums[1];
          // Of codes, not of numbers; the offset is 0 where a minimum holds what to subtract.
          const int dot = chunk.sums[part][place] + (kBelow<C> - w.offset) * of_x;
          sum = fmaf(static_cast<float>(dot), chunk.scales[place] * x.alpha, sum);
          if constexpr (kHasMinimum<S>) {
            sum = fmaf(chunk.minima[place], x.alpha * static_cast<float>(of_x), sum);
          }
        }
      }
    }
    __syncthreads();
  }
  if (owns) *c = sum;
}

template <class Kind, int T>
void launch_kind(const PackedMatvecArgs& args, cudaStream_t stream) {
  launch(packed_matvec_kernel<Kind::kCodes, Kind::kScales, Kind::kHalves, T>,
         static_cast<unsigned>(ceil_div(args.w.rows, kStripRows)), kThreads, 0, stream, args);
}

PackedSpan span_layout(const Format& format, int64_t cols) {
  const bool groups = format.group > 0;
  return {
      static_cast<int32_t>(groups ? group_array_at(format, cols, 1) : 0),
      static_cast<int32_t>(row_of(format.scales).span_f16 > 0 ? span_array_at(format, cols, 0) : 0),
      static_cast<int32_t>(block_at(format, cols, 0))};
}

int shift_of(int64_t blocks) {
  int shift = 0;
  while (int64_t{1} << shift < blocks) ++shift;
  return shift;
}

}  // namespace

PackedMatrix::PackedMatrix(const void* weights, const Format& format, int64_t matrix_rows,
                           int64_t matrix_cols)
    : strips(static_cast<const uint8_t*>(weights)),
      codes(format.codes),
      scales(format.scales),
      halves(format.group == 16),
      wide(format.wide),
      offset(format.offset),
      group_shift(shift_of((format.group == 0 ? kSpanCols : format.group) / kBlockCols)),
      rows(matrix_rows),
      cols(matrix_cols),
      strip_bytes(helm::strip_bytes(format, cols)),
      span_bytes(helm::span_bytes(format, kSpanCols)),
      strip_header(static_cast<int32_t>(strip_header_bytes(format))),
      last_span(static_cast<int32_t>((cols - 1) / kSpanCols)),
      whole(span_layout(format, kSpanCols)),
      last(span_layout(format, span_cols(format, cols, last_span * kSpanCols))) {}

void quantize(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return;
  const int64_t blocks = ceil_div(args.cols, kBlockCols);
  launch(quantize_kernel, static_cast<unsigned>(ceil_div(args.tokens * blocks, kThreads / kWarp)),
         kThreads, 0, stream, args, blocks);
}

void packed_matvec(const PackedMatvecArgs& args, cudaStream_t stream) {
  if (args.w.rows == 0 || args.tokens == 0) return;
  with_kind(args.w, [&](auto kind) {
    using Kind = decltype(kind);
    if (args.tokens == 1) {
      launch_kind<Kind, 1>(args, stream);
    } else if (args.tokens <= 4) {
      launch_kind<Kind, 4>(args, stream);
    } else {
      launch_kind<Kind, 8>(args, stream);
    }
  });
}

}  // namespace helm::cuda
