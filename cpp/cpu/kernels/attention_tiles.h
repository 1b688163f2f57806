// The two products of attention over one block of keys as stored: scores and outputs.
// While a block is read, the block that lies ahead of it is fetched, so that memory works while
// scores become weights. Knows no masks and no softmax.
#pragma once

#include "cpu/kernels/matmul.h"

namespace helm::cpu {
namespace {

inline constexpr int kPvRows = 6;  // rows per register tile of the output
inline constexpr int64_t kTilesInTurn = 4;

// What is fetched while a block is read, by the first of the tiles that read it, in one of two ways
// (see ahead_of): BlockAhead, InOrder. A tile reads `count` rows of the block, of each some
// bytes from `column` on: if it is of the first, fetch<Bytes>(i) goes with the i-th of its steps,
// which read so many.

// Of the block itself what comes next, and of its bytes before `until` those that lie `by` on, in
// the following block, to L2, as a block more would push this block's scores and keys out of a 32
// KiB L1; what lies `near` on, from there to L1. Lines in between are asked for twice more: while
// its queues are full a core drops requests, and a block in L2 is computed faster than memory
// delivers the next one (Zen 4: 3 to 5 points of the ceiling once, and again).
struct BlockAhead {
  static constexpr int64_t kAgainBytes = 4096;

  bool first = false;
  int64_t by = 0;
  const char* until = nullptr;

  // The following block, if there is one, as far as this one is as long.
  static BlockAhead of(const void* next, int64_t next_bytes, const void* now) {
    if (next == nullptr) return {true};
    return {
        true,
        static_cast<int64_t>(reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(now)),
        static_cast<const char*>(now) + next_bytes};
  }

  // What lies ahead of p, whose block ends at `end`.
  template <int64_t Bytes>
  HELM_INLINE void fetch(const void* p, int64_t near, const void* end) const {
    const auto* at = static_cast<const char*>(p);
    const bool follows = at < until;
    const int64_t left = static_cast<const char*>(end) - at;
    HELM_UNROLL
    for (int64_t b = 0; b < Bytes; b += kLineBytes) {
      if (follows) {
        __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(at) + by + b),
                           0, 2);
      }
      if (left > 2 * kAgainBytes) __builtin_prefetch(at + 2 * kAgainBytes + b, 0, 2);
      if (left > kAgainBytes) __builtin_prefetch(at + kAgainBytes + b, 0, 2);
      __builtin_prefetch(at + near + b);
    }
  }

  struct Tile {
    bool first;
    const BlockAhead& ahead;
    const char* p;
    int64_t stride, near;
    const void* end;

    template <int64_t Bytes>
    HELM_INLINE void fetch(int64_t i) const {
      ahead.fetch<Bytes>(p + i * stride, near, end);
    }
  };
  // How many rows, of so many bytes, are to be read before any of them is read again.
  int64_t rows_at_once(int64_t) const { return kKeyBlock; }
  Tile tile(const void* rows, int64_t column, int64_t, int64_t stride, int64_t near,
            const void* end) const {
    return {first, *this, static_cast<const char*>(rows) + column, stride, near, end};
  }
};

// To L1 what is read kBytes later, each line once and in the order of memory: from the block, and
// near its end from `next`, which is read after it. Where registers do not hold the outputs of
// whole rows of V, so few rows are read at a time that these are kBytes too, and memory sees them
// in order as well. A core with few requests to memory reads so a tenth to two fifths faster than
// with BlockAhead, which asks for a line up to four times (Zen 3; 1, 1.5, 3 to 6 KiB: no gain).
struct InOrder {
  static constexpr int64_t kBytes = 2048;

  bool first = false;
  const char* next = nullptr;

  struct Tile {
    bool first;
    const char* at;

    template <int64_t Bytes>
    HELM_INLINE void fetch(int64_t i) const {
      HELM_UNROLL
      for (int64_t b = 0; b < Bytes; b += kLineBytes) __builtin_prefetch(at + i * Bytes + b);
    }
  };
  int64_t rows_at_once(int64_t row_bytes) const {
    return first ? max_of(1, kBytes / row_bytes) : kKeyBlock;
  }
  Tile tile(const void* rows, int64_t column, int64_t count, int64_t, int64_t,
            const void* end) const {
    const char* at = static_cast<const char*>(rows) + column * count + kBytes;
    const int64_t past = at - static_cast<const char*>(end);
    if (past < 0) return {first, at};
    if (next == nullptr) return {false, at};
    return {first, next + past};
  }
};

// While the keys or values at `now` are read, after which those at `then` come; at `next` are what
// the following block has of the same.
template <class V>
auto ahead_of(const void* now, const void* then, const void* next, int64_t next_bytes) {
  if constexpr (V::kAskOnce) {
    return InOrder{true, static_cast<const char*>(then)};
  } else {
    return BlockAhead::of(next, next_bytes, now);
  }
}

// Keys of a tile with T rows: more than four where the registers allow, to keep sums in flight.
template <class V>
constexpr int score_keys(int T) {
  return 2 * T <= V::kScoreRows ? 2 * kQuad : kQuad;
}

// The queries of a score, [rows, head_dim], rows `stride` elements apart.
template <class P>
struct QueryRows {
  const typename P::Input* at;
  int64_t stride;
};

// S(t, j) = sum_d Q(t, d) * K(j, d)    for T rows of q and K consecutive keys, of which the last
// stands for those that do not exist; the block of these ends at `end`. P multiplies; the order of
// the sum is that of matmul.h.
template <class P, int T, class A>
HELM_INLINE void score_tile(QueryRows<P> q, int64_t head_dim, const typename P::Store* k,
                            int64_t keys, const void* end, float* scores, const A& ahead) {
  using V = typename P::V;
  using F = typename V::F;
  using Store = typename P::Store;
  using Input = typename P::Input;
  constexpr int K = score_keys<V>(T);
  constexpr int64_t kBytes = K * P::kStep * static_cast<int64_t>(sizeof(Store));
  const Store* row[K];
  HELM_UNROLL
  for (int r = 0; r < K; ++r) row[r] = k + min_of(r, keys - 1) * head_dim;
  F acc[T * K];
  HELM_UNROLL
  for (int i = 0; i < T * K; ++i) acc[i] = V::zero();
  const auto step = [&](auto load_k, auto load_q, int64_t d) HELM_LAMBDA_INLINE {
    typename P::A y[T];
    HELM_UNROLL
    for (int t = 0; t < T; ++t) y[t] = load_q(q.at + t * q.stride + d);
    HELM_UNROLL
    for (int r = 0; r < K; ++r) {
      const typename P::W x = load_k(row[r] + d);
      HELM_UNROLL
      for (int t = 0; t < T; ++t) acc[t * K + r] = P::fma(x, y[t], acc[t * K + r]);
    }
  };
  const auto lines = ahead.tile(k, 0, K, kBytes, K * head_dim * int64_t{sizeof(Store)}, end);
  int64_t d = 0;
  for (; d + P::kStep <= head_dim; d += P::kStep) {
    if (lines.first) lines.template fetch<kBytes>(d / P::kStep);
    step([](const Store* p) HELM_LAMBDA_INLINE { return P::load_w(p); },
         [](const Input* p) HELM_LAMBDA_INLINE { return P::load_a(p); }, d);
  }
  if (d < head_dim) {
    const int64_t n = head_dim - d;
    step([n](const Store* p) HELM_LAMBDA_INLINE { return P::load_w_n(p, n); },
         [n](const Input* p) HELM_LAMBDA_INLINE { return P::load_a_n(p, n); }, d);
  }
  float sums[T * K];
  V::template reduce<T * K>(acc, sums);
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    __builtin_memcpy(scores + t * kKeyBlock, sums + t * K, K * sizeof(float));
  }
}

template <class P, int T, class A>
void score_rows(QueryRows<P> q, int64_t head_dim, const typename P::Store* k, int64_t keys,
                const void* end, float* scores, const A& ahead) {
  for (int64_t j = 0; j < keys; j += score_keys<typename P::V>(T)) {
    score_tile<P, T>(q, head_dim, k + j * head_dim, keys - j, end, scores + j, ahead);
  }
}

// Scores of all rows, in tiles as even as possible, against one block of keys as stored. The first
// tile reads keys from memory or L2, the others from there or L1. Up to kTilesInTurn take turns
// where what is ahead is fetched by so many rows, so that memory is busy during all of them (Zen 3,
// 4 query heads per KV head: a tenth faster); more would have the queries read from L2 at each
// turn. seen(end): keys that rows before `end` see, in a block; what a tile has not computed is
// undefined.
template <class P, class Seen, class A>
void score_block(QueryRows<P> q, int64_t rows, int64_t head_dim, const typename P::Store* k,
                 Seen seen, float* scores, const A& ahead) {
  constexpr int kMost = P::V::kScoreRows;
  const int64_t tiles = (rows + kMost - 1) / kMost;
  const int64_t most = (rows + tiles - 1) / tiles, full = rows - tiles * (most - 1);
  const int64_t keys = seen(rows);
  const void* end = k + keys * head_dim;
  int64_t turn = kKeyBlock;
  if (tiles > 1 && tiles <= kTilesInTurn) {
    turn = round_up(ahead.rows_at_once(head_dim * int64_t{sizeof(*k)}), 2 * kQuad);
  }
  for (int64_t j = 0; j < keys; j += turn) {
    QueryRows<P> tile = q;
    float* to = scores + j;
    A now = ahead;
    for (int64_t i = 0, last = 0; i < tiles; ++i, now = {}) {
      const int64_t n = i < full ? most : most - 1;
      const int64_t left = min_of(turn, seen(last += n) - j);  // none where it is not positive
      switch (n) {
#define HELM_TILE(T)                                                          \
  case T:                                                                     \
    if constexpr (T <= kMost)                                                 \
      score_rows<P, T>(tile, head_dim, k + j * head_dim, left, end, to, now); \
    break;
        HELM_TILE(1) HELM_TILE(2) HELM_TILE(3) HELM_TILE(4) HELM_TILE(5) HELM_TILE(6)
#undef HELM_TILE
      }
      tile.at += n * q.stride, to += n * kKeyBlock;
    }
  }
}

// o(r, d) = o(r, d) * correct(r) + sum_j p(r, j) * V(j, d)    for R rows and N vectors along d;
// correct: null for ones. lines: of a tile of `ahead`.
template <class V, DType D, int R, int N, class Lines>
HELM_INLINE void output_tile(const float* p, const float* correct, int64_t keys,
                             const typename Elem<V, D>::Store* v, int64_t head_dim, float* o,
                             const Lines& lines) {
  using E = Elem<V, D>;
  using F = typename V::F;
  constexpr bool kSplit = kInPairs<V, D> && N % 2 == 0;
  constexpr int64_t kBytes = N * V::kLanes * static_cast<int64_t>(sizeof(typename E::Store));
  F acc[R][N];
  HELM_UNROLL
  for (int r = 0; r < R; ++r) {
    HELM_UNROLL
    for (int n = 0; n < N; ++n) acc[r][n] = V::load(o + r * head_dim + n * V::kLanes);
    if (correct != nullptr) {
      HELM_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = V::mul(acc[r][n], V::set1(correct[r]));
    }
    if constexpr (kSplit) {
      HELM_UNROLL
      for (int n = 0; n < N; n += 2) V::split(acc[r][n], acc[r][n + 1]);
    }
  }
  const auto key = [&](int64_t j) HELM_LAMBDA_INLINE {
    F x[N];
    if constexpr (kSplit) {
      HELM_UNROLL
      for (int n = 0; n < N; n += 2) {
        x[n] = V::load_bf16_even(v + n * V::kLanes);
        x[n + 1] = V::load_bf16_odd(v + n * V::kLanes);
      }
    } else {
      HELM_UNROLL
      for (int n = 0; n < N; ++n) x[n] = E::load(v + n * V::kLanes);
    }
    HELM_UNROLL
    for (int r = 0; r < R; ++r) {
      const F weight = V::set1(p[r * kKeyBlock + j]);
      HELM_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(weight, x[n], acc[r][n]);
    }
  };
  // Two loops: where registers are scarce compilers ask at every key whether to fetch, which takes
  // half as many instructions again (AVX2: 5 to 10 % of a prompt's attention).
  if (lines.first) {
    for (int64_t j = 0; j < keys; ++j, v += head_dim) {
      lines.template fetch<kBytes>(j);
      key(j);
    }
  } else {
    for (int64_t j = 0; j < keys; ++j, v += head_dim) key(j);
  }
  HELM_UNROLL
  for (int r = 0; r < R; ++r) {
    if constexpr (kSplit) {
      HELM_UNROLL
      for (int n = 0; n < N; n += 2) V::join(acc[r][n], acc[r][n + 1]);
    }
    HELM_UNROLL
    for (int n = 0; n < N; ++n) V::store(o + r * head_dim + n * V::kLanes, acc[r][n]);
  }
}

// The same for the last `dims` < lanes elements of one row.
template <class V, DType D>
void output_tail(const float* p, float correct, int64_t keys, const typename Elem<V, D>::Store* v,
                 int64_t head_dim, float* o, int64_t dims) {
  auto acc = V::mul(V::load_n(o, dims), V::set1(correct));
  for (int64_t j = 0; j < keys; ++j, v += head_dim) {
    acc = V::fma(V::set1(p[j]), Elem<V, D>::load_n(v, dims), acc);
  }
  V::store_n(o, acc, dims);
}

template <class V, DType D, int R, class A>
void output_rows(const float* p, const float* correct, int64_t keys,
                 const typename Elem<V, D>::Store* v, int64_t head_dim, float* o, const A& ahead) {
  constexpr int N = V::kOutputVectors[R];
  constexpr int64_t kSize = sizeof(*v);
  const int64_t row_bytes = head_dim * kSize, at_once = ahead.rows_at_once(row_bytes);
  int64_t d = 0;
  for (int64_t j = 0; j < keys; j += at_once) {
    const int64_t n = min_of(at_once, keys - j);
    const auto* rows = v + j * head_dim;
    const auto lines = [&]() HELM_LAMBDA_INLINE {
      return ahead.tile(rows, d * kSize, n, row_bytes, 2 * row_bytes, v + keys * head_dim);
    };
    const float* factor = j == 0 ? correct : nullptr;
    for (d = 0; d + N * V::kLanes <= head_dim; d += N * V::kLanes) {
      output_tile<V, D, R, N>(p + j, factor, n, rows + d, head_dim, o + d, lines());
    }
    for (; d + V::kLanes <= head_dim; d += V::kLanes) {
      output_tile<V, D, R, 1>(p + j, factor, n, rows + d, head_dim, o + d, lines());
    }
  }
  if (d == head_dim) return;
  for (int r = 0; r < R; ++r) {
    output_tail<V, D>(p + r * kKeyBlock, correct[r], keys, v + d, head_dim, o + r * head_dim + d,
                      head_dim - d);
  }
}

// seen: as score_block's; all weights of other keys are zero.
template <class V, DType D, class Seen, class A>
void output(const float* p, const float* correct, int64_t rows, Seen seen,
            const typename Elem<V, D>::Store* v, int64_t head_dim, float* o, A ahead) {
  for (int64_t r = 0; r < rows; r += kPvRows, ahead = {}) {
    const int64_t keys = seen(min_of(rows, r + kPvRows));
    if (keys == 0) continue;  // what they have stays
    const float* pr = p + r * kKeyBlock;
    const float* cr = correct + r;
    float* out = o + r * head_dim;
    switch (min_of(kPvRows, rows - r)) {
#define HELM_ROWS(n)                                             \
  case n:                                                        \
    output_rows<V, D, n>(pr, cr, keys, v, head_dim, out, ahead); \
    break;
      HELM_ROWS(1) HELM_ROWS(2) HELM_ROWS(3) HELM_ROWS(4) HELM_ROWS(5) HELM_ROWS(6)
#undef HELM_ROWS
    }
  }
}

}  // namespace
}  // namespace helm::cpu
