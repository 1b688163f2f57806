// Mixtures of experts: which experts a token goes to, and what they make of it.
//
// A warp routes a row. Of experts a warp has sixteen rows of packed weights, two lanes each, or one
// of dense ones; it goes through the pairs of token and expert one by one, so a decode step reads
// each chosen expert once.
#include "mixture.h"

#include <algorithm>

#include "packed.cuh"
#include "vec.cuh"

namespace helm::cuda {
namespace {

constexpr int kWarps = 4;
constexpr unsigned kAllLanes = ~0u;
constexpr int64_t kMostBlocks = 65535;

struct Choice {
  float value;
  int expert;
};

// Whether a comes before b: greater, or of equal ones the lower expert.
__device__ __forceinline__ bool before(const Choice& a, const Choice& b) {
  return a.value > b.value || (a.value == b.value && a.expert < b.expert);
}

__device__ __forceinline__ Choice first_of_warp(Choice own) {
  for (int s = kWarp / 2; s > 0; s /= 2) {
    const Choice other{__shfl_xor_sync(kAllLanes, own.value, s),
                       __shfl_xor_sync(kAllLanes, own.expert, s)};
    if (before(other, own)) own = other;
  }
  return own;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int s = kWarp / 2; s > 0; s /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, s));
  return x;
}

__global__ void __launch_bounds__(kWarp) route_kernel(const RouteArgs a) {
  let_next_begin();
  await_previous();
  __shared__ float best[kMostGroups], weights[kMostChosen];
  __shared__ int ids[kMostChosen];
  const float minus_inf = -INFINITY;
  const int lane = static_cast<int>(threadIdx.x);
  const float* logits = a.in + int64_t{blockIdx.x} * a.experts;
  float* out = a.out + int64_t{blockIdx.x} * 2 * a.chosen;
  float most = minus_inf;
  bool broken = false;
  for (int e = lane; e < a.experts; e += kWarp) {
    broken = broken || logits[e] != logits[e];
    most = fmaxf(most, logits[e]);
  }
  most = warp_max(most);
  if (__any_sync(kAllLanes, broken) || fabsf(most) == INFINITY) {
    for (int i = lane; i < a.chosen; i += kWarp) out[i] = i, out[a.chosen + i] = NAN;
    return;
  }
  float sum = 0;
  for (int e = lane; e < a.experts; e += kWarp) sum += expf(logits[e] - most);
  sum = warp_sum(sum);
  const auto score = [&](int e) {
    if (a.score == RouteScore::kSoftmax) return expf(logits[e] - most) / sum;
    if (a.score == RouteScore::kSigmoid) return 1.0f / (1.0f + expf(-logits[e]));
    return logits[e];
  };
  const auto choice = [&](int e) { return score(e) + (a.bias == nullptr ? 0.0f : a.bias[e]); };
  const int size = a.experts / a.groups;
  // Greatest after `last` of [begin, begin + count), by one thread.
  const auto next_of = [&](int begin, int count, Choice last) {
    Choice found{minus_inf, a.experts};
    for (int e = begin; e < begin + count; ++e) {
      const Choice one{choice(e), e};
      if (before(last, one) && before(one, found)) found = one;
    }
    return found;
  };
  unsigned long long kept = ~0ull;
  if (a.groups > 1) {
    for (int g = lane; g < a.groups; g += kWarp) {
      Choice last{INFINITY, -1};
      best[g] = 0;
      for (int i = 0; i < a.group_best; ++i) {
        last = next_of(g * size, size, last);
        best[g] += last.value;
      }
    }
    __syncwarp();
    kept = 0;
    Choice last{INFINITY, -1};
    for (int i = 0; i < a.groups_kept; ++i) {
      Choice found{minus_inf, a.groups};
      for (int g = lane; g < a.groups; g += kWarp) {
        const Choice one{best[g], g};
        if (before(last, one) && before(one, found)) found = one;
      }
      last = first_of_warp(found);
      kept |= 1ull << last.expert;
    }
  }
  Choice last{INFINITY, -1};
  for (int i = 0; i < a.chosen; ++i) {
    Choice found{minus_inf, a.experts};
    for (int e = lane; e < a.experts; e += kWarp) {
      if ((kept >> e / size & 1) == 0) continue;
      const Choice one{choice(e), e};
      if (before(last, one) && before(one, found)) found = one;
    }
    const Choice taken = first_of_warp(found);
    float weight = 0;
    if (a.score == RouteScore::kSparsemixer) {  // of those not taken that are near
      for (int e = lane; e < a.experts; e += kWarp) {
        const float below = (taken.value - logits[e]) / fmaxf(fabsf(logits[e]), taken.value);
        if (before(last, {logits[e], e}) && !(below > a.near)) {
          weight += expf(logits[e] - taken.value);
        }
      }
      weight = 1.0f / warp_sum(weight);
    } else {
      weight = score(taken.expert);
    }
    last = taken;
    if (lane == 0) ids[i] = taken.expert, weights[i] = weight;
  }
  if (lane != 0) return;
  for (int i = 1; i < a.chosen; ++i) {  // ascending
    for (int j = i; j > 0 && ids[j] < ids[j - 1]; --j) {
      const int id = ids[j];
      const float weight = weights[j];
      ids[j] = ids[j - 1], weights[j] = weights[j - 1];
      ids[j - 1] = id, weights[j - 1] = weight;
    }
  }
  float total = 0, greatest = minus_inf;
  for (int i = 0; i < a.chosen; ++i) greatest = fmaxf(greatest, weights[i]);
  const bool selected = a.score == RouteScore::kSoftmaxSelected;
  for (int i = 0; i < a.chosen; ++i) {
    if (selected) weights[i] = expf(weights[i] - greatest);
    total += weights[i];
  }
  const float factor = selected || a.normalise ? (total > 0 ? a.scale / total : 0) : a.scale;
  for (int i = 0; i < a.chosen; ++i) {
    out[i] = static_cast<float>(ids[i]);
    out[a.chosen + i] = weights[i] * factor;
  }
}

// Rows of a matrix: kRows of them per warp, lane l has row l % kRows of these.
template <DType D>
struct DenseRows {
  static constexpr int kRows = 1;
  const Store<D>* data;
  int64_t cols;
  explicit DenseRows(const ExpertMatrix& m)
      : data(static_cast<const Store<D>*>(m.dense)), cols(m.cols) {}

  __device__ __forceinline__ float dot(int64_t row, int lane, const float* x) const {
    const Store<D>* w = data + row * cols;
    float sum = 0;
    for (int64_t k = lane; k < cols; k += kWarp) sum = fmaf(widen<D>(w[k]), x[k], sum);
    return warp_sum(sum);
  }
};

template <class Kind>
struct PackedRows {
  static constexpr int kRows = kRowsOfStrip;
  PackedMatrix m;
  explicit PackedRows(const ExpertMatrix& matrix) : m(matrix.packed) {}

  __device__ __forceinline__ float dot(int64_t row, int lane, const float* x) const {
    constexpr Codes C = Kind::kCodes;
    constexpr int kHalf = static_cast<int>(kBlockCols) / 2;
    const int own = static_cast<int>(row % kRowsOfStrip);
    float sum = 0;
    for (int64_t block = lane / kRowsOfStrip; block * kBlockCols < m.cols;
         block += kWarp / kRowsOfStrip) {
      const PackedPlace at(m, row / kRowsOfStrip, block);
      unsigned words[kCodeWords<C>], quads[kQuads];
      load_codes<C>(at.codes<C>(), own, words);
      numbers<C>(words, quads);
      const int64_t col = block * kBlockCols;
      const int count = static_cast<int>(min(m.cols - col, kBlockCols));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowScale scale = read_scale<Kind::kScales>(m, at, at.group(m, half), own);
        float numbers_sum = 0, plain = 0;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          const int k = half * kHalf + i;
          const int number = static_cast<int8_t>(quads[k / 4] >> k % 4 * 8) + kBelow<C>;
          const float v = k < count ? x[col + k] : 0.0f;
          numbers_sum = fmaf(static_cast<float>(number - scale.zero), v, numbers_sum);
          plain += v;
        }
        sum = fmaf(scale.scale, numbers_sum, sum);
        if constexpr (kHasMinimum<Kind::kScales>) {
          if (Kind::kScales != Scales::kZ) sum = fmaf(scale.minimum, plain, sum);
        }
      }
    }
    return sum + __shfl_xor_sync(kAllLanes, sum, kRowsOfStrip);
  }
};

__device__ __forceinline__ float gated(ActivationKind kind, float factor, float x, float up) {
  switch (kind) {
    case ActivationKind::kSwigluLimit: {
      const float low = fminf(x, factor);
      return low / (1.0f + expf(-1.702f * low)) * (fminf(fmaxf(up, -factor), factor) + 1.0f);
    }
    case ActivationKind::kGelu:
      return 0.5f * x * erfcf(x * -0.70710678118654752f) * up;
    case ActivationKind::kGeluTanh:
      return x / (1.0f + expf(-1.5957691216057308f * x * (1.0f + 0.044715f * x * x))) * up;
    case ActivationKind::kRelu:
      return (x < 0.0f ? 0.0f : x) * up;
    default:
      return x / (1.0f + expf(-x)) * up;
  }
}

// -1 where a route is no expert.
__device__ __forceinline__ int64_t expert_of(const ExpertsArgs& a, int64_t row, int64_t i) {
  const float id = a.routes[row * 2 * a.chosen + i];
  return id >= 0 && id < static_cast<float>(a.experts) ? static_cast<int64_t>(id) : -1;
}

template <class Rows>
__global__ void __launch_bounds__(kWarps* kWarp)
    gate_up_kernel(const ExpertsArgs a, const Rows gate, const Rows up) {
  let_next_begin();
  await_previous();
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * Rows::kRows;
  if (first >= a.size) return;
  const int64_t own = first + lane % Rows::kRows, i = min(own, a.size - 1);
  for (int64_t pair = blockIdx.y; pair < a.rows * a.chosen; pair += gridDim.y) {
    const int64_t row = pair / a.chosen, e = max(expert_of(a, row, pair % a.chosen), int64_t{0});
    int64_t gate_row = e * a.size + i, up_row = gate_row;
    if (a.layout == GateUp::kHalves) gate_row += e * a.size, up_row = gate_row + a.size;
    if (a.layout == GateUp::kNeighbours) gate_row *= 2, up_row = gate_row + 1;
    const float* x = a.in + row * a.gate.cols;
    float g = gate.dot(gate_row, lane, x), u = up.dot(up_row, lane, x);
    const float* up_bias = a.layout == GateUp::kApart ? a.up_bias : a.gate_bias;
    if (a.gate_bias != nullptr) g += a.gate_bias[gate_row];
    if (up_bias != nullptr) u += up_bias[up_row];
    if (lane < Rows::kRows && own < a.size) {
      a.act[pair * a.size + own] = gated(a.activation, a.factor, g, u);
    }
  }
}

template <class Rows>
__global__ void __launch_bounds__(kWarps* kWarp) down_kernel(const ExpertsArgs a, const Rows down) {
  let_next_begin();
  await_previous();
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * Rows::kRows;
  if (first >= a.out_width) return;
  const int64_t own = first + lane % Rows::kRows, r = min(own, a.out_width - 1);
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    float sum = 0;
    for (int64_t i = 0; i < a.chosen; ++i) {
      const int64_t e = expert_of(a, row, i), at = max(e, int64_t{0}) * a.out_width + r;
      float v = down.dot(at, lane, a.act + (row * a.chosen + i) * a.size);
      if (a.down_bias != nullptr) v += a.down_bias[at];
      sum = fmaf(e < 0 ? NAN : a.routes[(row * 2 + 1) * a.chosen + i], v, sum);
    }
    if (lane < Rows::kRows && own < a.out_width) a.out[row * a.out_width + own] += sum;
  }
}

template <class F>
void with_rows(const ExpertMatrix& m, const F& f) {
  if (m.is_packed) {
    return with_kind(m.packed,
                     [&](auto kind) { f(std::type_identity<PackedRows<decltype(kind)>>{}); });
  }
  with_dtype(m.dtype,
             [&](auto dtype) { f(std::type_identity<DenseRows<decltype(dtype)::value>>{}); });
}

dim3 grid_of(int64_t rows, int per_warp, int64_t times) {
  return dim3(static_cast<unsigned>(ceil_div(rows, int64_t{per_warp} * kWarps)),
              static_cast<unsigned>(std::min(times, kMostBlocks)));
}

}  // namespace

void route(const RouteArgs& args, const Queue& queue) {
  if (args.rows == 0) return;
  launch(route_kernel, dim3(static_cast<unsigned>(args.rows)), kWarp, 0, queue, args);
}

void experts(const ExpertsArgs& args, const Queue& queue) {
  if (args.rows == 0) return;
  const ExpertMatrix& up = args.layout == GateUp::kApart ? args.up : args.gate;
  with_rows(args.gate, [&](auto type) {
    using Rows = typename decltype(type)::type;
    launch(gate_up_kernel<Rows>, grid_of(args.size, Rows::kRows, args.rows * args.chosen),
           kWarps * kWarp, 0, queue, args, Rows(args.gate), Rows(up));
  });
  with_rows(args.down, [&](auto type) {
    using Rows = typename decltype(type)::type;
    launch(down_kernel<Rows>, grid_of(args.out_width, Rows::kRows, args.rows), kWarps * kWarp, 0,
           queue, args, Rows(args.down));
  });
}

}  // namespace helm::cuda
