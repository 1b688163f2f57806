// Partial attention of one KV head over one span, blocked over keys with a running maximum.
//
// Key blocks lie at fixed offsets from the span's start, scores come from the dot products of
// matmul.h and outputs take keys in order, so a (query, head) has the same bits for every number of
// queries. A row (query i, head g) is numbered i * group + g, its place in m, s and o.
#pragma once

#include "cpu/kernels/matmul.h"

namespace helm::cpu {
namespace {

inline constexpr int64_t kKeyBlock = 64;     // scores and f32 K, V blocks of a tile stay in L2
inline constexpr int64_t kRowTile = 96;      // rows that share one widened K and V block
inline constexpr int64_t kDirectRows = 16;   // up to here K and V are read as stored
inline constexpr int kPvRows = 6;            // rows per register tile of the output

template <class V>
int64_t padded_dim(int64_t head_dim) {
  return round_up(head_dim, V::kLanes);
}

// Scratch of one call, carved from AttentionArgs::scratch.
struct AttentionScratch {
  float* q;        // direct: [rows, head_dim]; panel: tiles of kTileTokens rows, packed
  float* scores;   // [kRowTile, kKeyBlock]
  float* correct;  // [kRowTile] factor for what o holds
  float* k;        // [kKeyBlock / 4][steps][4][lanes]
  float* v;        // [kKeyBlock, padded head_dim]
};

template <class V>
int64_t carve(float* base, int64_t head_dim, AttentionScratch* out) {
  const int64_t dim = padded_dim<V>(head_dim);
  out->q = base;
  out->scores = out->q + kRowTile * dim;
  out->correct = out->scores + kRowTile * kKeyBlock;
  out->k = out->correct + round_up(kRowTile, 16);
  out->v = out->k + kKeyBlock * dim;
  return static_cast<int64_t>(sizeof(float)) *
         (round_up(kRowTile, 16) + kRowTile * (dim + kKeyBlock) + 2 * kKeyBlock * dim);
}

template <class V>
int64_t attention_scratch_bytes(int64_t head_dim) {
  AttentionScratch unused;
  return carve<V>(nullptr, head_dim, &unused);
}

// o(r, d) = o(r, d) * correct(r) + sum_j p(r, j) * V(j, d)    for R rows and one chunk of d
template <class V, DType D, int R, int N>
HELM_INLINE void output_tile(const float* p, const float* correct, int64_t keys,
                             const typename Elem<V, D>::Store* v, int64_t v_stride, float* o,
                             int64_t o_stride, int64_t prefetch_bytes) {
  using E = Elem<V, D>;
  using F = typename V::F;
  constexpr int64_t kBytes = N * V::kLanes * static_cast<int64_t>(sizeof(typename E::Store));
  F acc[R][N];
  HELM_UNROLL
  for (int r = 0; r < R; ++r) {
    const F factor = V::set1(correct[r]);
    HELM_UNROLL
    for (int n = 0; n < N; ++n) {
      acc[r][n] = V::mul(V::load(o + r * o_stride + n * V::kLanes), factor);
    }
  }
  for (int64_t j = 0; j < keys; ++j, v += v_stride) {
    if (prefetch_bytes > 0) {
      HELM_UNROLL
      for (int64_t b = 0; b < kBytes; b += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(v) + b + prefetch_bytes);
      }
    }
    F x[N];
    HELM_UNROLL
    for (int n = 0; n < N; ++n) x[n] = E::load(v + n * V::kLanes);
    HELM_UNROLL
    for (int r = 0; r < R; ++r) {
      const F weight = V::set1(p[r * kKeyBlock + j]);
      HELM_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(weight, x[n], acc[r][n]);
    }
  }
  HELM_UNROLL
  for (int r = 0; r < R; ++r) {
    HELM_UNROLL
    for (int n = 0; n < N; ++n) V::store(o + r * o_stride + n * V::kLanes, acc[r][n]);
  }
}

// The same for the last `dims` < lanes elements of one row.
template <class V, DType D>
void output_tail(const float* p, float correct, int64_t keys, const typename Elem<V, D>::Store* v,
                 int64_t v_stride, float* o, int64_t dims) {
  auto acc = V::mul(V::load_n(o, dims), V::set1(correct));
  for (int64_t j = 0; j < keys; ++j, v += v_stride) {
    acc = V::fma(V::set1(p[j]), Elem<V, D>::load_n(v, dims), acc);
  }
  V::store_n(o, acc, dims);
}

template <class V, DType D, int R>
void output_rows(const float* p, const float* correct, int64_t keys,
                 const typename Elem<V, D>::Store* v, int64_t v_stride, float* o, int64_t head_dim,
                 int64_t prefetch_bytes) {
  constexpr int N = V::kOutputVectors[R];
  int64_t d = 0;
  for (; d + N * V::kLanes <= head_dim; d += N * V::kLanes) {
    output_tile<V, D, R, N>(p, correct, keys, v + d, v_stride, o + d, head_dim, prefetch_bytes);
  }
  for (; d + V::kLanes <= head_dim; d += V::kLanes) {
    output_tile<V, D, R, 1>(p, correct, keys, v + d, v_stride, o + d, head_dim, prefetch_bytes);
  }
  if (d == head_dim) return;
  for (int r = 0; r < R; ++r) {
    output_tail<V, D>(p + r * kKeyBlock, correct[r], keys, v + d, v_stride, o + r * head_dim + d,
                      head_dim - d);
  }
}

template <class V, DType D>
void output(const float* p, const float* correct, int64_t rows, int64_t keys,
            const typename Elem<V, D>::Store* v, int64_t v_stride, float* o, int64_t head_dim,
            int64_t prefetch_bytes) {
  for (int64_t r = 0; r < rows; r += kPvRows) {
    const float* pr = p + r * kKeyBlock;
    const float* cr = correct + r;
    float* out = o + r * head_dim;
    switch (min_of(kPvRows, rows - r)) {
#define HELM_ROWS(n) \
  case n:            \
    output_rows<V, D, n>(pr, cr, keys, v, v_stride, out, head_dim, prefetch_bytes); break;
      HELM_ROWS(1) HELM_ROWS(2) HELM_ROWS(3) HELM_ROWS(4) HELM_ROWS(5) HELM_ROWS(6)
#undef HELM_ROWS
    }
  }
}

// Turns one row of scores into exp(score - max), zero outside [begin, end), and moves the row's
// running maximum and sum. Returns the factor for the row's output so far.
template <class V>
float softmax_row(float* x, int64_t keys, int64_t begin, int64_t end, float* m, float* s) {
  using F = typename V::F;
  constexpr float kNone = -__builtin_inff();
  const int64_t padded = round_up(keys, V::kLanes);
  F top = V::set1(kNone);
  if (begin < end) {
    for (int64_t j = 0; j < begin; ++j) x[j] = kNone;
    for (int64_t j = end; j < padded; ++j) x[j] = kNone;
    for (int64_t j = 0; j < padded; j += V::kLanes) top = V::max(top, V::load(x + j));
  }
  const float block_max = V::max_lane(top);
  if (block_max == kNone) {
    for (int64_t j = 0; j < padded; ++j) x[j] = 0.0f;
    return 1.0f;
  }
  const float max = block_max > *m ? block_max : *m;
  const F shift = V::set1(max);
  F sum = V::zero();
  for (int64_t j = 0; j < padded; j += V::kLanes) {
    const F e = exp<V>(V::sub(V::load(x + j), shift));
    V::store(x + j, e);
    sum = V::add(sum, e);
  }
  float correct = 1.0f;
  if (max != *m) V::store_n(&correct, exp<V>(V::set1(*m - max)), 1);
  *s = *s * correct + V::sum(sum);
  *m = max;
  return correct;
}

template <class V>
void softmax_rows(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                  int64_t rows, int64_t key0, int64_t keys) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    // Last visible key of this row, relative to the block.
    const int64_t last = a.first_query + row / a.group - a.first_key - key0;
    const int64_t end = min_of(keys, last + 1);
    const int64_t begin = a.window > 0 ? max_of(0, last - a.window + 1) : 0;
    scratch.correct[r] =
        softmax_row<V>(scratch.scores + r * kKeyBlock, keys, begin, end, a.m + row, a.s + row);
  }
}

template <class V, DType D>
void block_direct(const AttentionArgs& a, const AttentionScratch& scratch, int64_t rows,
                  int64_t key0, int64_t keys) {
  using Store = typename Elem<V, D>::Store;
  const int64_t block_bytes = kKeyBlock * a.head_dim * static_cast<int64_t>(sizeof(Store));
  const Store* k = static_cast<const Store*>(a.span.k) + key0 * a.head_dim;
  const Store* v = static_cast<const Store*>(a.span.v) + key0 * a.head_dim;
  const MatmulArgs product{scratch.q, a.head_dim, rows,  k,       keys, a.head_dim,
                           nullptr,   false,      scratch.scores, kKeyBlock, nullptr};
  matmul_direct<V, D>(product, block_bytes);
  softmax_rows<V>(a, scratch, 0, rows, key0, keys);
  output<V, D>(scratch.scores, scratch.correct, rows, keys, v, a.head_dim, a.o, a.head_dim,
               block_bytes);
}

template <class V, DType D>
void block_panel(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                 int64_t rows, int64_t key0, int64_t keys) {
  using Store = typename Elem<V, D>::Store;
  const int64_t dim = padded_dim<V>(a.head_dim);
  const int64_t steps = dim / V::kLanes;
  const Store* k = static_cast<const Store*>(a.span.k) + key0 * a.head_dim;
  const Store* v = static_cast<const Store*>(a.span.v) + key0 * a.head_dim;
  for (int64_t j = 0; j < keys; j += kQuad) {
    pack_quad<V, D>(k + j * a.head_dim, a.head_dim, keys - j, a.head_dim, scratch.k + j * dim);
  }
  __builtin_memset(scratch.scores, 0, static_cast<size_t>(rows * kKeyBlock) * sizeof(float));
  for (int64_t r = 0; r < rows; r += V::kTileTokens) {
    sweep_panel<V>(scratch.q + r * dim, min_of(V::kTileTokens, rows - r), scratch.k, keys, steps,
                   scratch.scores + r * kKeyBlock, kKeyBlock);
  }
  softmax_rows<V>(a, scratch, row0, rows, key0, keys);
  for (int64_t j = 0; j < keys; ++j) {
    pack_token<V, D>(v + j * a.head_dim, 1, a.head_dim, scratch.v + j * dim);
  }
  output<V, DType::kF32>(scratch.scores, scratch.correct, rows, keys, scratch.v, dim,
                         a.o + row0 * a.head_dim, a.head_dim, 0);
}

template <class V>
void clear_rows(const AttentionArgs& a, int64_t row0, int64_t rows) {
  for (int64_t r = row0; r < row0 + rows; ++r) a.m[r] = -__builtin_inff();
  __builtin_memset(a.s + row0, 0, static_cast<size_t>(rows) * sizeof(float));
  __builtin_memset(a.o + row0 * a.head_dim, 0,
                   static_cast<size_t>(rows * a.head_dim) * sizeof(float));
}

// scale * Q of a tile: rows one after the other for the direct path, packed tiles otherwise.
template <class V>
void load_queries(const AttentionArgs& a, const AttentionScratch& scratch, int64_t row0,
                  int64_t rows, bool direct) {
  const int64_t dim = padded_dim<V>(a.head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    const float* q = a.q + row / a.group * a.q_stride + row % a.group * a.head_dim;
    float* scaled = direct ? scratch.q + r * a.head_dim : scratch.scores;
    for_vectors<V>(a.head_dim, [&](int64_t d, auto load, auto store) HELM_LAMBDA_INLINE {
      store(scaled + d, V::mul(load(q + d), V::set1(a.scale)));
    });
    if (direct) continue;
    const int64_t tile = r / V::kTileTokens * V::kTileTokens;
    pack_token<V, DType::kF32>(scaled, min_of(V::kTileTokens, rows - tile), a.head_dim,
                               scratch.q + tile * dim + (r - tile) * V::kLanes);
  }
}

template <class V, DType D>
void attention(const AttentionArgs& a) {
  AttentionScratch scratch;
  carve<V>(static_cast<float*>(a.scratch), a.head_dim, &scratch);
  const int64_t total = a.queries * a.group;
  const bool direct = total <= kDirectRows;
  for (int64_t row0 = 0; row0 < total; row0 += kRowTile) {
    const int64_t rows = min_of(kRowTile, total - row0);
    clear_rows<V>(a, row0, rows);
    load_queries<V>(a, scratch, row0, rows, direct);
    // Keys that some row of the tile sees; blocks outside are never touched.
    const int64_t first = a.first_query + row0 / a.group - a.first_key;
    const int64_t last = a.first_query + (row0 + rows - 1) / a.group - a.first_key;
    const int64_t end = min_of(a.span.count, last + 1);
    const int64_t begin = a.window > 0 ? max_of(0, first - a.window + 1) : 0;
    for (int64_t j = begin / kKeyBlock * kKeyBlock; j < end; j += kKeyBlock) {
      const int64_t keys = min_of(kKeyBlock, end - j);
      if (direct) {
        block_direct<V, D>(a, scratch, rows, j, keys);
      } else {
        block_panel<V, D>(a, scratch, row0, rows, j, keys);
      }
    }
  }
}

}  // namespace
}  // namespace helm::cpu
