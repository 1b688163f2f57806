// Ops that treat elements one by one: embedding, activation, narrowing, sums, choice of rows.
#include <algorithm>
#include <initializer_list>

#include "kernels.h"
#include "vec.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;  // columns, so that each thread has several loads in flight

// op.value(row, column, values), then op.store(row, column, values), for all of [rows, cols], V
// columns side by side at a time.
template <class Op, int V>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(int64_t rows, int64_t cols, const Op op) {
  constexpr int kRuns = kPerThread / V / (V == 1 ? 2 : 1);
  let_next_begin();
  await_previous();
  const int64_t block = int64_t{blockIdx.x} * kThreads * V * kRuns;
  const int64_t first = block + int64_t{threadIdx.x} * V;
  const bool whole = block + int64_t{kThreads} * V * kRuns <= cols;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float values[kRuns][V];
    if (whole) {  // no branch stands between the loads
#pragma unroll
      for (int i = 0; i < kRuns; ++i) op.value(row, first + i * kThreads * V, values[i]);
#pragma unroll
      for (int i = 0; i < kRuns; ++i) op.store(row, first + i * kThreads * V, values[i]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int64_t col = first + i * kThreads * V;
      if (col >= cols) break;
      op.value(row, col, values[i]);
      op.store(row, col, values[i]);
    }
  }
}

// vectors: whether rows are whole pieces of four columns, aligned as load_columns() says.
template <class Op>
void for_each_element(int64_t rows, int64_t cols, bool vectors, const Queue& queue, const Op& op) {
  if (rows == 0 || cols == 0) return;
  const int per_thread = vectors ? kPerThread : kPerThread / 2;
  const auto columns = static_cast<unsigned>(ceil_div(cols, kThreads * per_thread));
  launch(vectors ? elementwise_kernel<Op, 4> : elementwise_kernel<Op, 1>,
         dim3(columns, static_cast<unsigned>(std::min(rows, kMostElementwiseBlocks))), kThreads, 0,
         queue, rows, cols, op);
}

// Whether all row starts are whole pieces of four elements.
bool in_fours(std::initializer_list<const void*> bases, std::initializer_list<int64_t> strides) {
  return std::ranges::all_of(bases, [](const void* base) { return aligned16(base); }) &&
         std::ranges::all_of(strides, [](int64_t stride) { return stride % 4 == 0; });
}

template <DType D>
struct Embed {
  const Store<D>* table;
  const int32_t* token_ids;
  float* out;
  int64_t width;
  float scale;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    load_columns<D>(table + token_ids[t] * width + i, v);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] *= scale;
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    store_columns<DType::kF32>(out + t * width + i, v);
  }
};

template <DType D>
struct EmbedPosition {
  const Store<D>* table;
  const int32_t* positions;
  int64_t offset;
  float* out;
  int64_t width;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    float held[V];
    load_columns<DType::kF32>(out + t * width + i, held);
    load_columns<D>(table + (positions[t] + offset) * width + i, v);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] = held[k] + v[k];
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    store_columns<DType::kF32>(out + t * width + i, v);
  }
};

template <DType D>
struct Narrow {
  const float* x;
  int64_t x_stride;
  Store<D>* y;
  int64_t cols;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    load_columns<DType::kF32>(x + t * x_stride + i, v);
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    store_columns<D>(y + t * cols + i, v);
  }
};

struct Add {
  const float* x;
  int64_t x_stride;  // 0: the same row for all
  float* y;
  int64_t y_stride;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    float held[V];
    load_columns<DType::kF32>(y + t * y_stride + i, held);
    load_columns<DType::kF32>(x + t * x_stride + i, v);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] = held[k] + v[k];
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    store_columns<DType::kF32>(y + t * y_stride + i, v);
  }
};

struct CopyColumns {
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    load_columns<DType::kF32>(x + t * x_stride + i, v);
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    store_columns<DType::kF32>(y + t * y_stride + i, v);
  }
};

struct Select {
  const float* in;
  float* out;
  int64_t width;
  const int32_t* output_rows;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    load_columns<DType::kF32>(in + output_rows[t] * width + i, v);
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    store_columns<DType::kF32>(out + t * width + i, v);
  }
};

// Written so that extremes stay finite: exp overflows to infinity only in a denominator.
template <ActivationKind K>
__device__ __forceinline__ float activate(float x, float factor) {
  if constexpr (K == ActivationKind::kScale) return factor * x;
  if constexpr (K == ActivationKind::kSoftcap) return factor * tanhf(x / factor);
  if constexpr (K == ActivationKind::kSilu) return x / (1.0f + expf(-x));
  if constexpr (K == ActivationKind::kGelu) return 0.5f * x * erfcf(x * -0.70710678118654752f);
  if constexpr (K == ActivationKind::kRelu) return x < 0.0f ? 0.0f : x;
  if constexpr (K == ActivationKind::kSwigluLimit) {
    const float low = fminf(x, factor);
    return low / (1.0f + expf(-1.702f * low));
  }
  // x/2 * (1 + tanh(u)) = x / (1 + exp(-2u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
  return x / (1.0f + expf(-1.5957691216057308f * x * (1.0f + 0.044715f * x * x)));
}

template <ActivationKind K>
__device__ __forceinline__ float gated_part(float up, float factor) {
  if constexpr (K != ActivationKind::kSwigluLimit) return up;
  return fminf(fmaxf(up, -factor), factor) + 1.0f;
}

// D: of the copy, f32 for none.
template <ActivationKind K, DType D>
struct Activate {
  ActivationArgs args;
  template <int V>
  __device__ void value(int64_t t, int64_t i, float (&v)[V]) const {
    const float* x = args.x + t * args.x_stride + i;
    float factor[V] = {};
    load_columns<DType::kF32>(x, v);
    if (args.gated) load_columns<DType::kF32>(x + args.n, factor);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      v[k] = activate<K>(v[k], args.factor);
      if (args.gated) v[k] *= gated_part<K>(factor[k], args.factor);
    }
    if (!args.accumulate) return;
    float held[V];
    load_columns<DType::kF32>(args.y + t * args.y_stride + i, held);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += held[k];
  }
  template <int V>
  __device__ void store(int64_t t, int64_t i, const float (&v)[V]) const {
    if constexpr (D != DType::kF32) {
      store_columns<D>(static_cast<Store<D>*>(args.copy.y) + t * args.n + i, v);
    }
    if (D == DType::kF32 || args.y != nullptr) {
      store_columns<DType::kF32>(args.y + t * args.y_stride + i, v);
    }
  }
};

template <ActivationKind K>
void activation_of(const ActivationArgs& args, const Queue& queue) {
  const bool vectors =
      in_fours({args.x, args.y, args.copy.y}, {args.x_stride, args.y_stride, args.n});
  with_dtype(args.copy.dtype, [&](auto dtype) {
    for_each_element(args.rows, args.n, vectors, queue, Activate<K, decltype(dtype)::value>{args});
  });
}

}  // namespace

bool kernels_await_previous() {
  cudaFuncAttributes attributes{};
  const bool known =
      cudaFuncGetAttributes(&attributes, elementwise_kernel<Select, 4>) == cudaSuccess;
  if (!known) cudaGetLastError();  // taken note of
  return known && attributes.ptxVersion >= 90;
}

void embedding(const EmbeddingArgs& args, const StepTables& step, const Queue& queue) {
  with_dtype(args.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for_each_element(args.tokens, args.width, in_fours({args.table, args.out}, {args.width}), queue,
                     Embed<D>{static_cast<const Store<D>*>(args.table), step.token_ids, args.out,
                              args.width, args.scale});
  });
}

void position_embedding(const PositionEmbeddingArgs& args, const StepTables& step,
                        const Queue& queue) {
  with_dtype(args.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for_each_element(args.tokens, args.width, in_fours({args.table, args.out}, {args.width}), queue,
                     EmbedPosition<D>{static_cast<const Store<D>*>(args.table), step.positions,
                                      args.offset, args.out, args.width});
  });
}

void narrow(const float* x, int64_t x_stride, int64_t rows, int64_t cols, DType dtype, void* y,
            const Queue& queue) {
  with_dtype(dtype, [&](auto tag) {
    constexpr DType D = decltype(tag)::value;
    for_each_element(rows, cols, in_fours({x, y}, {x_stride, cols}), queue,
                     Narrow<D>{x, x_stride, static_cast<Store<D>*>(y), cols});
  });
}

void add(const float* x, int64_t x_stride, int64_t rows, int64_t cols, float* y, int64_t y_stride,
         const Queue& queue) {
  for_each_element(rows, cols, in_fours({x, y}, {x_stride, y_stride, cols}), queue,
                   Add{x, x_stride, y, y_stride});
}

void copy_columns(const float* x, int64_t x_stride, int64_t rows, int64_t cols, float* y,
                  int64_t y_stride, const Queue& queue) {
  for_each_element(rows, cols, in_fours({x, y}, {x_stride, y_stride, cols}), queue,
                   CopyColumns{x, x_stride, y, y_stride});
}

void select(const float* in, float* out, int64_t width, int64_t outputs, const StepTables& step,
            const Queue& queue) {
  for_each_element(outputs, width, in_fours({in, out}, {width}), queue,
                   Select{in, out, width, step.output_rows});
}

void activation(const ActivationArgs& args, const Queue& queue) {
  switch (args.kind) {
    case ActivationKind::kSilu:
      return activation_of<ActivationKind::kSilu>(args, queue);
    case ActivationKind::kGelu:
      return activation_of<ActivationKind::kGelu>(args, queue);
    case ActivationKind::kGeluTanh:
      return activation_of<ActivationKind::kGeluTanh>(args, queue);
    case ActivationKind::kRelu:
      return activation_of<ActivationKind::kRelu>(args, queue);
    case ActivationKind::kScale:
      return activation_of<ActivationKind::kScale>(args, queue);
    case ActivationKind::kSoftcap:
      return activation_of<ActivationKind::kSoftcap>(args, queue);
    case ActivationKind::kSwigluLimit:
      return activation_of<ActivationKind::kSwigluLimit>(args, queue);
  }
}

}  // namespace helm::cuda
