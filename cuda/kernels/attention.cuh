// What decode, prefill and merging of attention share: the keys of a split and its partial result.
//
// Scores are kept in units of log 2, so that a weight is exp2(score - m). A split cuts the visible
// positions of its rows at multiples of kSplitKeys, whatever the size of pages, from the tables in
// device memory: a replayed launch follows the context as it grows.
#pragma once

#include <limits>

#include "kernels.h"
#include "kv.cuh"
#include "vec.cuh"

namespace helm::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct KeyRange {
  int32_t begin, end;
};

// Split blockIdx.z of gridDim.z of the positions that queries at [first, last] see.
__device__ __forceinline__ KeyRange keys_of_split(int32_t first, int32_t last, int64_t window) {
  const auto seen = static_cast<int32_t>(window > 0 ? max(int64_t{0}, first - window + 1) : 0);
  // In 64 bits: the last of many splits may lie beyond any position.
  const int64_t chunk0 = seen / kSplitKeys, chunks = last / kSplitKeys + 1 - chunk0;
  const int64_t share = ceil_div(chunks, gridDim.z);
  const int64_t begin = (chunk0 + blockIdx.z * share) * kSplitKeys;
  const int64_t end = begin + share * kSplitKeys;
  return {static_cast<int32_t>(min(max(begin, int64_t{seen}), int64_t{last} + 1)),
          static_cast<int32_t>(min(end, int64_t{last} + 1))};
}

__device__ __forceinline__ bool visible(int32_t query, int32_t key, int64_t window) {
  return key <= query && (window == 0 || query - key < window);
}

// The value to subtract from scores of maximum m: finite, so that masked scores weigh 0, not NaN.
__device__ __forceinline__ float shift_of(float m) {
  return m == kMinusInf ? 0.0f : m;
}

// Where the result of one row and split goes: o, and (m, s) unless it is final. Partials are
// o [tokens, heads, splits, head_dim], then (m, s) [tokens, heads, splits, 2].
struct PartialRow {
  float* o;    // [head_dim]
  float* m_s;  // [2] or null

  __device__ __forceinline__ PartialRow(const AttentionArgs& a, int64_t token, int64_t head) {
    const int64_t row = token * a.heads + head, head_dim = a.kv.head_dim;
    if (gridDim.z == 1) {
      o = a.out + row * head_dim;
      m_s = nullptr;
    } else {
      const int64_t part = row * gridDim.z + blockIdx.z;
      auto* base = static_cast<float*>(a.partials);
      o = base + part * head_dim;
      m_s = base + a.tokens * a.heads * gridDim.z * head_dim + part * 2;
    }
  }

  // The factor for o. A sum of 0 stays 0, NaN stays NaN.
  __device__ __forceinline__ float scale(float s) const {
    if (m_s != nullptr) return 1.0f;
    return s > 0.0f ? 1.0f / s : s;
  }
};

void attention_decode(const AttentionArgs& args, const StepTables& step, cudaStream_t stream);
void attention_prefill(const AttentionArgs& args, const StepTables& step, cudaStream_t stream);

// Whether K and V rows may be read in pieces.
inline bool vector_rows(const KvPool& kv) {
  return kv.head_dim % kPiece == 0 && aligned16(kv.base);
}

}  // namespace helm::cuda
