// Ops that treat elements one by one: embedding, activation, narrowing, bias, choice of rows.
#include <algorithm>

#include "kernels.h"
#include "vec.cuh"

namespace helm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // columns, so that each thread has several loads in flight
constexpr int64_t kMostRowBlocks = 65535;

// op.store(row, column, op.value(row, column)) for every element of [rows, cols].
template <class Op>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(int64_t rows, int64_t cols, const Op op) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kPerThread + threadIdx.x;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float values[kPerThread] = {};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t col = first + i * kThreads;
      if (col < cols) values[i] = op.value(row, col);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t col = first + i * kThreads;
      if (col < cols) op.store(row, col, values[i]);
    }
  }
}

template <class Op>
void for_each_element(int64_t rows, int64_t cols, cudaStream_t stream, const Op& op) {
  if (rows == 0 || cols == 0) return;
  const auto columns = static_cast<unsigned>(ceil_div(cols, kThreads * kPerThread));
  launch(elementwise_kernel<Op>,
         dim3(columns, static_cast<unsigned>(std::min(rows, kMostRowBlocks))), kThreads, 0, stream,
         rows, cols, op);
}

template <DType D>
struct Embed {
  const Store<D>* table;
  const int32_t* token_ids;
  float* out;
  int64_t width;
  __device__ float value(int64_t t, int64_t i) const {
    return widen<D>(table[token_ids[t] * width + i]);
  }
  __device__ void store(int64_t t, int64_t i, float v) const { out[t * width + i] = v; }
};

template <DType D>
struct EmbedPosition {
  const Store<D>* table;
  const int32_t* positions;
  int64_t offset;
  float* out;
  int64_t width;
  __device__ float value(int64_t t, int64_t i) const {
    return out[t * width + i] + widen<D>(table[(positions[t] + offset) * width + i]);
  }
  __device__ void store(int64_t t, int64_t i, float v) const { out[t * width + i] = v; }
};

template <DType D>
struct Narrow {
  const float* x;
  int64_t x_stride;
  Store<D>* y;
  int64_t cols;
  __device__ float value(int64_t t, int64_t i) const { return x[t * x_stride + i]; }
  __device__ void store(int64_t t, int64_t i, float v) const { y[t * cols + i] = narrowed<D>(v); }
};

struct AddBias {
  const float* bias;
  float* c;
  int64_t c_stride;
  __device__ float value(int64_t t, int64_t i) const { return c[t * c_stride + i] + bias[i]; }
  __device__ void store(int64_t t, int64_t i, float v) const { c[t * c_stride + i] = v; }
};

struct Select {
  const float* in;
  float* out;
  int64_t width;
  const int32_t* output_rows;
  __device__ float value(int64_t t, int64_t i) const { return in[output_rows[t] * width + i]; }
  __device__ void store(int64_t t, int64_t i, float v) const { out[t * width + i] = v; }
};

// Written so that extremes stay finite: exp overflows to infinity only in a denominator.
template <ActivationKind K>
__device__ __forceinline__ float activate(float x) {
  if constexpr (K == ActivationKind::kSilu) return x / (1.0f + expf(-x));
  if constexpr (K == ActivationKind::kGelu) return 0.5f * x * erfcf(x * -0.70710678118654752f);
  if constexpr (K == ActivationKind::kRelu) return x < 0.0f ? 0.0f : x;
  // x/2 * (1 + tanh(u)) = x / (1 + exp(-2u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
  return x / (1.0f + expf(-1.5957691216057308f * x * (1.0f + 0.044715f * x * x)));
}

// D: of the copy, f32 for none.
template <ActivationKind K, DType D>
struct Activate {
  ActivationArgs args;
  __device__ float value(int64_t t, int64_t i) const {
    const float* x = args.x + t * args.x_stride + i;
    const float y = activate<K>(x[0]);
    return args.gated ? y * x[args.n] : y;
  }
  __device__ void store(int64_t t, int64_t i, float v) const {
    if constexpr (D != DType::kF32) {
      static_cast<Store<D>*>(args.copy.y)[t * args.n + i] = narrowed<D>(v);
    }
    if (D == DType::kF32 || args.y != nullptr) args.y[t * args.y_stride + i] = v;
  }
};

template <ActivationKind K>
void activation_of(const ActivationArgs& args, cudaStream_t stream) {
  with_dtype(args.copy.dtype, [&](auto dtype) {
    for_each_element(args.rows, args.n, stream, Activate<K, decltype(dtype)::value>{args});
  });
}

}  // namespace

void embedding(const EmbeddingArgs& args, const StepTables& step, cudaStream_t stream) {
  with_dtype(args.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for_each_element(
        args.tokens, args.width, stream,
        Embed<D>{static_cast<const Store<D>*>(args.table), step.token_ids, args.out, args.width});
  });
}

void position_embedding(const PositionEmbeddingArgs& args, const StepTables& step,
                        cudaStream_t stream) {
  with_dtype(args.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for_each_element(args.tokens, args.width, stream,
                     EmbedPosition<D>{static_cast<const Store<D>*>(args.table), step.positions,
                                      args.offset, args.out, args.width});
  });
}

void narrow(const float* x, int64_t x_stride, int64_t rows, int64_t cols, DType dtype, void* y,
            cudaStream_t stream) {
  with_dtype(dtype, [&](auto tag) {
    constexpr DType D = decltype(tag)::value;
    for_each_element(rows, cols, stream, Narrow<D>{x, x_stride, static_cast<Store<D>*>(y), cols});
  });
}

void add_bias(const float* bias, int64_t rows, int64_t cols, float* c, int64_t c_stride,
              cudaStream_t stream) {
  for_each_element(rows, cols, stream, AddBias{bias, c, c_stride});
}

void select(const float* in, float* out, int64_t width, int64_t outputs, const StepTables& step,
            cudaStream_t stream) {
  for_each_element(outputs, width, stream, Select{in, out, width, step.output_rows});
}

void activation(const ActivationArgs& args, cudaStream_t stream) {
  switch (args.kind) {
    case ActivationKind::kSilu:
      return activation_of<ActivationKind::kSilu>(args, stream);
    case ActivationKind::kGelu:
      return activation_of<ActivationKind::kGelu>(args, stream);
    case ActivationKind::kGeluTanh:
      return activation_of<ActivationKind::kGeluTanh>(args, stream);
    case ActivationKind::kRelu:
      return activation_of<ActivationKind::kRelu>(args, stream);
  }
}

}  // namespace helm::cuda
