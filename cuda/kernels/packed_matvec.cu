// Products of few tokens with packed weights, bound by reading the weights once, in the CPU's order
// of sums.
//
// A block of threads owns a strip of 16 rows. Its threads sum integers, one row of a block of
// columns each, for some spans at a time; then one thread per (token, row) adds these up in order.
#include "packed.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = kRowsOfStrip * kBlocksOfSpan;  // a span at a time
constexpr unsigned kInfinity = 0x7f800000u;
constexpr size_t kSharedBytes = 48 << 10;  // that a block of threads has without asking
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
  let_next_begin();
  await_previous();
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

// A block of activations in shared memory.
struct Activations {
  unsigned words[sizeof(QuantBlock) / sizeof(unsigned)];

  __device__ __forceinline__ float alpha() const { return __uint_as_float(words[8]); }
  // Of a half of the block, or of all of it.
  template <int H>
  __device__ __forceinline__ int sum(int half) const {
    const int first = static_cast<int>(words[9]), second = static_cast<int>(words[10]);
    return H == 1 ? first + second : half == 0 ? first : second;
  }
  // What n has beyond a byte, in one column at most: its sum of products with numbers().
  template <int H>
  __device__ __forceinline__ int far_sum(int half, const unsigned (&quads)[kQuads]) const {
    const int far = static_cast<int16_t>(words[11]), col = static_cast<int>(words[11] >> 16);
    if (far == 0 || (H == 2 && col / 16 != half)) return 0;
    const int one = 1 << col % 4 * 8;
    int number = 0;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {  // registers have no index
      number = __dp4a(static_cast<int>(quads[k]), col / 4 == k ? one : 0, number);
    }
    return number * far * (1 << kFarShift);
  }
};
static_assert(sizeof(Activations) == sizeof(QuantBlock));

// What the chains add times the sum of activations. Like the CPU's fma, never -0 but for kM.
template <Scales S>
__device__ __forceinline__ float minimum_of(const RowScale& s) {
  if constexpr (S == Scales::kZ) return fmaf(-s.scale, static_cast<float>(s.zero), 0.0f);
  if constexpr (S == Scales::kKM) return s.minimum + 0.0f;
  return s.minimum;
}

// What a row of a block adds to the chain of a token: factors of one or of two products.
template <bool kMinimum>
struct Term {
  float dot, scale;
  __device__ __forceinline__ float add(float sum) const { return fmaf(dot, scale, sum); }
};
template <>
struct alignas(16) Term<true> {
  float dot, scale, minimum, of_x;
  __device__ __forceinline__ float add(float sum) const {
    return fmaf(minimum, of_x, fmaf(dot, scale, sum));
  }
};

// Of a strip and some spans of columns.
template <Scales S, int H, int T, int Blocks>
struct Chunk {
  static constexpr int kPlaces = H * Blocks * kRowsOfStrip;
  static constexpr int kVectors = T * Blocks * static_cast<int>(sizeof(QuantBlock) / sizeof(uint4));
  static constexpr int kVectorsOfThread = (kVectors + kThreads - 1) / kThreads;
  alignas(16) Activations activations[T][Blocks];
  alignas(16) Term<kHasMinimum<S>> terms[T][kPlaces];

  __device__ static int place(int block, int half, int row) {
    return (block * H + half) * kRowsOfStrip + row;
  }
};

// Loads of the next chunk are under way while the threads sum integers of this one, and while the
// owners of the results add up. Two chunks lie in shared memory where there is room, so that the
// other warps go on.
template <Codes C, Scales S, bool kHalves, int T>
__global__ void __launch_bounds__(kThreads) packed_matvec_kernel(const PackedMatvecArgs args) {
  constexpr int H = kHalves ? 2 : 1;
  constexpr int kSpans = T == 1 ? 4 : T == 4 ? 2 : 1;  // at a time
  constexpr int kBlocks = kSpans * kBlocksOfSpan;
  using Part = Chunk<S, H, T, kBlocks>;
  constexpr int kBuffers = 2 * sizeof(Part) <= kSharedBytes ? 2 : 1;
  __shared__ Part chunks[kBuffers];
  let_next_begin();
  const PackedMatrix& w = args.w;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread % kRowsOfStrip, part = thread / kRowsOfStrip;
  const int64_t strip = blockIdx.x, blocks = ceil_div(w.cols, kBlockCols);

  unsigned words[kSpans][kCodeWords<C>];
  RowScale scales[kSpans][H];
  uint4 vectors[Part::kVectorsOfThread];
  // Blocks and tokens past the last repeat it.
  const auto load_weights = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      const PackedPlace at(w, strip, min(first + i * kBlocksOfSpan + part, blocks - 1));
      load_codes<C>(at.codes<C>(), row, words[i]);
#pragma unroll
      for (int h = 0; h < H; ++h) scales[i][h] = read_scale<S>(w, at, at.group(w, h), row);
    }
  };
  const auto load_activations = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < Part::kVectorsOfThread; ++i) {
      const int index = min(thread + i * kThreads, Part::kVectors - 1), whole = index / 3;
      const int64_t t = min(int64_t{whole / kBlocks}, args.tokens - 1);
      const int64_t block = min(first + whole % kBlocks, blocks - 1);
      vectors[i] = reinterpret_cast<const uint4*>(args.a + t * blocks + block)[index % 3];
    }
  };
  const auto store_activations = [&](Part& to) {
#pragma unroll
    for (int i = 0; i < Part::kVectorsOfThread; ++i) {
      const int index = thread + i * kThreads;
      if (index < Part::kVectors) reinterpret_cast<uint4*>(to.activations)[index] = vectors[i];
    }
  };

  const int64_t out_row = strip * kRowsOfStrip + row;
  const bool owns = part < T && part < args.tokens && out_row < w.rows;
  float* const c = args.c + part * args.c_stride + out_row;
  float sum = owns && args.bias != nullptr ? args.bias[out_row] : 0.0f;

  load_weights(0);
  await_previous();  // weights alone are read before
  if (owns && args.accumulate) sum = args.bias == nullptr ? *c : *c + sum;
  load_activations(0);
  store_activations(chunks[0]);
  __syncthreads();
  int turn = 0;
  for (int64_t first = 0; first < blocks; first += kBlocks) {
    Part& chunk = chunks[turn];
    unsigned quads[kSpans][kQuads];
    RowScale held[kSpans][H];
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      numbers<C>(words[i], quads[i]);
#pragma unroll
      for (int h = 0; h < H; ++h) held[i][h] = scales[i][h];
    }
    const bool more = first + kBlocks < blocks;
    if (more) {
      load_weights(first + kBlocks);
      load_activations(first + kBlocks);
    }
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      const int block = i * kBlocksOfSpan + part;
#pragma unroll
      for (int t = 0; t < T; ++t) {
        const Activations& a = chunk.activations[t][block];
#pragma unroll
        for (int h = 0; h < H; ++h) {
          int dot = a.far_sum<H>(h, quads[i]);
#pragma unroll
          for (int k = h * 4; k < h * 4 + kQuads / H; ++k) {
            dot = __dp4a(static_cast<int>(quads[i][k]), static_cast<int>(a.words[k]), dot);
          }
          const int of_x = a.sum<H>(h);
          // Of codes, not of numbers; the offset is 0 where a minimum holds what to subtract.
          dot += (kBelow<C> - w.offset) * of_x;
          auto& term = chunk.terms[t][Part::place(block, h, row)];
          term.dot = static_cast<float>(dot);
          term.scale = held[i][h].scale * a.alpha();
          if constexpr (kHasMinimum<S>) {
            term.minimum = minimum_of<S>(held[i][h]);
            term.of_x = a.alpha() * static_cast<float>(of_x);
          }
        }
      }
    }
    turn = kBuffers - 1 - turn;
    if (kBuffers == 2 && more) store_activations(chunks[turn]);
    __syncthreads();
    if (kBuffers == 1 && more) store_activations(chunks[turn]);
    if (part < T) {
      const auto* terms = chunk.terms[part] + row;
      const int count = H * static_cast<int>(min(blocks - first, int64_t{kBlocks}));
#pragma unroll 8
      for (int i = 0; i < count; ++i) sum = terms[i * kRowsOfStrip].add(sum);
    }
    if constexpr (kBuffers == 1) __syncthreads();
  }
  if (owns) *c = sum;
}

template <class Kind, int T>
void launch_kind(const PackedMatvecArgs& args, const Queue& queue) {
  launch(packed_matvec_kernel<Kind::kCodes, Kind::kScales, Kind::kHalves, T>,
         static_cast<unsigned>(ceil_div(args.w.rows, kStripRows)), kThreads, 0, queue, args);
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

void quantize(const QuantizeArgs& args, const Queue& queue) {
  if (args.tokens == 0) return;
  const int64_t blocks = ceil_div(args.cols, kBlockCols);
  launch(quantize_kernel, static_cast<unsigned>(ceil_div(args.tokens * blocks, kThreads / kWarp)),
         kThreads, 0, queue, args, blocks);
}

void packed_matvec(const PackedMatvecArgs& args, const Queue& queue) {
  if (args.w.rows == 0 || args.tokens == 0) return;
  with_kind(args.w, [&](auto kind) {
    using Kind = decltype(kind);
    if (args.tokens == 1) {
      launch_kind<Kind, 1>(args, queue);
    } else if (args.tokens <= 4) {
      launch_kind<Kind, 4>(args, queue);
    } else {
      launch_kind<Kind, 8>(args, queue);
    }
  });
}

}  // namespace helm::cuda
