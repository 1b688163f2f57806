// What decode, prefill and merging of attention share: the rows of a block, the keys of a split and
// its partial result.
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
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct KeyRange {
  int32_t begin, end;
};

// Split blockIdx.z of gridDim.z of the positions that queries of `run` at [first, last] see and
// that lie in blocks with pages.
__device__ __forceinline__ KeyRange keys_of_split(const AttentionArgs& a, const Run& run,
                                                  int32_t first, int32_t last) {
  // In 64 bits: the last of many splits may lie beyond any position.
  const int64_t seen = a.window > 0 ? max(int64_t{0}, first - a.window + 1) : 0;
  const int64_t from = max(seen, run.first_block * a.kv.page_tokens);
  const int64_t to = min(int64_t{last} + 1, run.end_block * a.kv.page_tokens);
  const int64_t chunk0 = from / kSplitKeys, chunks = max(ceil_div(to, kSplitKeys), chunk0) - chunk0;
  const int64_t share =  // a division of 32 bits: there are fewer than 2^31 positions
      (static_cast<uint32_t>(chunks) + gridDim.z - 1) / gridDim.z;
  const int64_t begin = (chunk0 + blockIdx.z * share) * kSplitKeys;
  const int64_t end = begin + share * kSplitKeys;
  return {static_cast<int32_t>(min(max(begin, from), to)), static_cast<int32_t>(min(end, to))};
}

__device__ __forceinline__ bool visible(int32_t query, int32_t key, int64_t window) {
  return key <= query && (window == 0 || query - key < window);
}

// A score, in units of log 2, after the cap of `a`, if there is one.
__device__ __forceinline__ float capped(const AttentionArgs& a, float score) {
  if (a.softcap == 0) return score;
  // cap * tanh(score / cap) by one power of 2
  const float cap = a.softcap * kLog2E;
  return cap - 2 * cap * reciprocal_fast(exp2_fast(score * a.cap_inverse) + 1);
}

// The value to subtract from scores of maximum m: finite, so that masked scores weigh 0, not NaN.
__device__ __forceinline__ float shift_of(float m) {
  return m == kMinusInf ? 0.0f : m;
}

// Maximum and sum of a row's weights.
struct Sums {
  float m, s;
};

// A row and head of a partial (helm::AttendOp). Its maximum is in natural units, as on every
// device: partials cross between them.
template <class Float>
struct PartialRow {
  Float *m, *s;
  Float* o;  // [head_dim]

  __device__ __forceinline__ PartialRow(Float* partial, int64_t token, int64_t head, int64_t heads,
                                        int64_t head_dim)
      : m(partial + token * heads * (head_dim + 2) + head),
        s(m + heads),
        o(m - head + 2 * heads + head * head_dim) {}
};

// Where the result of one row and split goes: with several splits as it is to
//   o [rows, heads, splits, head_dim], then (m, s) [rows, heads, splits, 2],
// else normalised to `out`, or merged into `partial`.
class ResultRow {
 public:
  // row: of the `rows` that the splits have.
  __device__ __forceinline__ ResultRow(const AttentionArgs& a, int64_t token, int64_t head,
                                       int64_t row, int64_t rows) {
    const int64_t head_dim = a.kv.head_dim;
    merges_ = gridDim.z == 1 && a.partial != nullptr;
    if (gridDim.z > 1) {
      const int64_t part = (row * a.heads + head) * gridDim.z + blockIdx.z;
      auto* base = static_cast<float*>(a.partials);
      o_ = base + part * head_dim;
      m_ = base + rows * a.heads * gridDim.z * head_dim + part * 2;
      s_ = m_ + 1;
    } else if (merges_) {
      const PartialRow<float> to(a.partial, token, head, a.heads, head_dim);
      o_ = to.o, m_ = to.m, s_ = to.s;
    } else {
      o_ = a.out + (token * a.heads + head) * head_dim;
      m_ = s_ = nullptr;
      if (a.sinks != nullptr) sink_ = a.sinks[head] * kLog2E;
    }
  }

  // What the row holds before. Threads that store must wait for those that read.
  __device__ __forceinline__ Sums held() const {
    return merges_ ? Sums{*m_, *s_} : Sums{kMinusInf, 0};
  }

  // The row's own sums, m in units of log 2.
  __device__ __forceinline__ void take(Sums held, Sums own) {
    sums_ = own, factor_ = 1, kept_ = 0;
    if (m_ == nullptr) {
      own.s += exp2_fast(sink_ - shift_of(own.m));
      factor_ = own.s > 0.0f ? 1.0f / own.s : own.s;  // a sum of 0 stays 0, NaN stays NaN
    } else if (merges_) {
      own.m *= kLn2;
      sums_.m = fmaxf(held.m, own.m);
      const float shift = shift_of(sums_.m);
      kept_ = exp2_fast((held.m - shift) * kLog2E);
      factor_ = exp2_fast((own.m - shift) * kLog2E);
      sums_.s = fmaf(held.s, kept_, own.s * factor_);
    }
  }
  __device__ __forceinline__ void store(int64_t d, float o) const {
    o_[d] = kept_ == 0.0f ? o * factor_ : fmaf(o_[d], kept_, o * factor_);
  }
  __device__ __forceinline__ void store_sums() const {  // by one thread
    if (m_ != nullptr) *m_ = sums_.m, *s_ = sums_.s;
  }

 private:
  float *o_, *m_, *s_;  // m_ and s_ are null where the result is final
  bool merges_;
  float sink_ = kMinusInf;  // in units of log 2
  Sums sums_;
  float factor_, kept_;  // for the row's own elements and for those held
};

// The rows of this block, kRows of those of all longer runs, tile after tile; rows is 0 if there
// are none. Late tiles of a run, which have the most keys, come first.
template <int kRows>
struct RowTile {
  Run run;
  int first_row;  // of the run's [tokens, group]
  int rows;

  __device__ __forceinline__ RowTile(const AttentionArgs& a, const StepTables& step, int group)
      : rows(0) {
    int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    for (int64_t r = 0; r < a.runs; ++r) {
      run = step.runs[r];
      if (run.tokens == 1) continue;
      const int run_rows = run.tokens * group, tiles = (run_rows + kRows - 1) / kRows;
      if (tile < tiles) {
        first_row = tile * kRows;
        rows = min(kRows, run_rows - first_row);
        return;
      }
      tile -= tiles;
    }
  }
  __device__ __forceinline__ int32_t position(int row, int group) const {
    return run.first_position + (first_row + row) / group;
  }
};

// Blocks of `rows` rows for all longer runs: full ones, and at most one ragged one per run.
inline dim3 prompt_grid(const AttentionArgs& a, int rows) {
  const int64_t tiles =
      (a.rows - a.singles) * (a.heads / a.kv.kv_heads) / rows + (a.runs - a.singles);
  return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(a.kv.kv_heads),
              static_cast<unsigned>(a.prompt_splits));
}

void attention_decode(const AttentionArgs& args, const StepTables& step, const Queue& queue);
// Longer runs: in f32, for every dtype of pages and every size of heads,
void attention_prefill(const AttentionArgs& args, const StepTables& step, cudaStream_t stream);
// or in tensor cores, for pages of f16 from sm_75 on and of bf16 from sm_80 on.
void attention_prompt(const AttentionArgs& args, const StepTables& step, cudaStream_t stream);

// Whether K and V rows may be read in pieces.
inline bool vector_rows(const KvPool& kv) {
  return kv.head_dim % kPiece == 0 && aligned16(kv.base);
}

}  // namespace helm::cuda
