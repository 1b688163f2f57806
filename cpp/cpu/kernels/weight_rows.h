// Where a product's weights come from: rows as they are stored, or rows of a compressed matrix,
// made plain in scratch shortly before they are needed. Products are templates over this.
#pragma once

#include <utility>

#include "cpu/kernels/dot.h"

namespace helm::cpu {
namespace {

// How often a tile asks memory for a line of its rows, each of which is a stream.
enum class Ask {
  // To L1, not far ahead. Best where a core has few requests to memory at a time (Zen 3: up to a
  // tenth faster for two to four tokens, a seventh for one token of compressed rows).
  kOnce,
  // Far ahead to L2, and close by from there to L1: fetched to L1 at once, lines that arrive early
  // would be pushed out again by the inputs of several tokens, and requests of memory would fill
  // the buffers that those inputs need when they come from L2.
  kTwice,
  // To L2 three times. A core drops requests while its queues are full, so that many lines come too
  // late (Zen 4: up to a quarter faster). Not where tiles compute as long as they read, nor for one
  // token and stored rows, which loses a tenth: there the hardware's own requests suffice.
  kAgain,
  // To L2 in the order of memory, whole groups of rows ahead: for tiles of rows that adjoin and
  // compute longer than they read. From there to L1 only floats, whose lines are computed in half
  // the time (of others it costs a twenty-fifth: they push inputs out of L1).
  kInOrder,
  // So, and a line of what is read after the product.
  kInOrderAndAfter,
};
inline constexpr int64_t kFarBytes = 1536;
inline constexpr int64_t kNearBytes = 3 * kLineBytes;
inline constexpr int64_t kAskBytes = 1024;          // once; between the times to L2
inline constexpr int64_t kInOrderBytes = 24 << 10;  // at least

template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Body, int... I>
HELM_INLINE void each_of(Body body, std::integer_sequence<int, I...>) {
  (body(Count<I>{}), ...);
}
// body(Count<i>) for i below N.
template <int N, class Body>
HELM_INLINE void each(Body body) {
  each_of(body, std::make_integer_sequence<int, N>());
}

// What a tile asks of memory for later: in each row's stream the line at `far` bytes, which moves
// on by `step` bytes with every line of weights computed; those nearer by are as far as kAsk says.
// In order: lines from there on, of the first row alone.
template <Ask kAsk>
struct Prefetch {
  int64_t far;
  int64_t step;
};
template <>
struct Prefetch<Ask::kInOrderAndAfter> {
  int64_t far;
  int64_t step;
  const std::byte* after;
};

// far: what is to be read far ahead; now: what is read.
template <Ask kAsk>
HELM_INLINE void ask(const void* far, const void* now, int64_t again_bytes, int64_t near_bytes) {
  if constexpr (kAsk == Ask::kOnce) return __builtin_prefetch(far);
  const auto* from = static_cast<const char*>(now);
  __builtin_prefetch(far, 0, 2);
  if constexpr (kAsk == Ask::kAgain) {
    __builtin_prefetch(from + 2 * again_bytes, 0, 2);
    __builtin_prefetch(from + again_bytes, 0, 2);
  }
  __builtin_prefetch(from + near_bytes);
}

// Row r of some is at + r * step. With every line of weights of N rows, from column k on, something
// of what comes later is fetched.
template <class Store>
struct StoredRows {
  static constexpr bool kCompressed = false;

  const Store* at;
  int64_t step;

  template <int N, Ask kAsk>
  HELM_INLINE void fetch(int64_t k, Prefetch<kAsk>& prefetch) const {
    if constexpr (kAsk == Ask::kInOrderAndAfter) {
      __builtin_prefetch(prefetch.after, 0, 2);
      prefetch.after += kLineBytes;
    }
    if constexpr (kAsk == Ask::kInOrder || kAsk == Ask::kInOrderAndAfter) {
      const auto* far = reinterpret_cast<const char*>(at) + prefetch.far;
      HELM_UNROLL
      for (int i = 0; i < (N + 1) / 2; ++i) __builtin_prefetch(far + i * kLineBytes, 0, 2);
      if constexpr (sizeof(Store) == sizeof(float)) {
        HELM_UNROLL
        for (int r = 0; r < N; ++r) {
          __builtin_prefetch(reinterpret_cast<const char*>(at + r * step + k) + kNearBytes);
        }
      }
    } else {
      HELM_UNROLL
      for (int r = 0; r < N; ++r) {
        const auto* row = reinterpret_cast<const char*>(at + r * step);
        const auto* now = row + k * static_cast<int64_t>(sizeof(Store));
        ask<kAsk>(row + prefetch.far, now, kAskBytes, kNearBytes);
      }
    }
    prefetch.far += prefetch.step;
  }
};

// Bytes of a compressed row for `cols` weights, and for a line of plain ones.
HELM_INLINE constexpr int64_t compressed_bytes(int64_t cols) {
  return cols * kChunkBytes / kChunk;
}
inline constexpr int64_t kCompressedAskBytes = 1152;
inline constexpr int64_t kCompressedNearBytes = 2 * kChunkBytes;
// Of so many multiply-adds for a chunk of a row at most, tiles ask again.
inline constexpr int64_t kOpsToAskAgain = 20;
inline constexpr int64_t kCompressedLineBytes =
    compressed_bytes(kLineBytes / static_cast<int64_t>(sizeof(uint16_t)));

// Rows that are plain in L1 already: of the compressed matrix what follows them is fetched.
struct PlainRows {
  static constexpr bool kCompressed = false;

  const uint16_t* at;
  int64_t step;
  const std::byte* from;
  int64_t from_step;  // bytes

  template <int N, Ask kAsk>
  HELM_INLINE void fetch(int64_t, Prefetch<kAsk>& prefetch) const {
    HELM_UNROLL
    for (int r = 0; r < N; ++r) __builtin_prefetch(from + r * from_step + prefetch.far, 0, 2);
    prefetch.far += prefetch.step;
  }
};

// Plain rows lie side by side, a line apart, as rows that begin in one set of L1 would push each
// other out.
constexpr int64_t plain_stride(int64_t cols) {
  return round_up(cols, kChunk) + kLineBytes / static_cast<int64_t>(sizeof(uint16_t));
}
constexpr int64_t plain_bytes(int64_t rows, int64_t cols) {
  return rows * plain_stride(cols) * static_cast<int64_t>(sizeof(uint16_t));
}

// N rows that one tile reads: they are made plain in registers, so that reading memory and
// computing overlap. (By way of L1 half of the rate is lost where a vector is loaded before its
// store is done.) But for the few chunks with escapes: to look for those at every vector took the
// registers that the sums need.
template <class P, int N>
struct CompressedRows {
  using V = typename P::V;
  using Words = typename V::Words;
  static constexpr bool kCompressed = true;
  static constexpr int kWords = static_cast<int>(sizeof(Words) / sizeof(uint16_t));
  static constexpr int kVector = 2 * kWords;  // weights, of two vectors of words
  static constexpr int kVectors = kChunk / kVector;

  uint16_t* at;  // room to make columns plain
  int64_t step;
  const std::byte* from;
  int64_t from_step;  // bytes
  int64_t k0;         // the column at `from`
  typename V::HighBytes high[N];
  const Escape* escapes[N];
  int64_t escape_count[N];

  // Vector I of the chunk that begins at column k of a row; escapes are not set right.
  template <int I>
  HELM_INLINE void vector(int r, int64_t k, Words (&out)[2]) const {
    const std::byte* chunk = from + r * from_step + compressed_bytes(k);
    V::template decompress<I % 2 * 4>(chunk + I / 2 * kVector, chunk + kCodeBytes + I * kVector,
                                      high[r], out);
  }
  // The first column, from k on, of a chunk that has an escape in any row or ends beyond `end`.
  HELM_INLINE int64_t next_plain(int64_t k, int64_t end) const {
    int64_t next = end / kChunk * kChunk;
    for (int r = 0; r < N; ++r) {
      for (int64_t i = 0; i < escape_count[r]; ++i) {
        const int64_t col = escapes[r][i].col - k0;
        if (col >= next) break;
        if (col >= k) next = col / kChunk * kChunk;
      }
    }
    return next;
  }
  // Makes the columns of [k, end) plain, k a multiple of kChunk. Apart from what calls it, whose
  // registers are full of sums.
  __attribute__((noinline)) void make_plain(int64_t k, int64_t end) const {
    for (int r = 0; r < N; ++r) {
      uint16_t* row = at + r * step;
      for (int64_t chunk = k; chunk < end; chunk += kChunk) {
        each<kVectors>([&](auto which) HELM_LAMBDA_INLINE {
          constexpr int I = decltype(which)::value;
          Words words[2];
          vector<I>(r, chunk, words);
          uint16_t* to = row + chunk + I * kVector;
          V::store_words(to, P::in_order(words[0]));
          V::store_words(to + kWords, P::in_order(words[1]));
        });
      }
      for (int64_t i = 0; i < escape_count[r]; ++i) {
        const int64_t col = escapes[r][i].col - k0;
        if (col >= k && col < end) row[col] = escapes[r][i].bits;
      }
    }
  }
  // With every chunk as much of what comes later is fetched, a share with each of its vectors:
  // requests that come all at once are dropped more often.
  template <int I, Ask kAsk>
  HELM_INLINE void fetch_vector(int r, int64_t k, const Prefetch<kAsk>& prefetch) const {
    constexpr int64_t kLines = kChunkBytes / kLineBytes;
    const std::byte* row = from + r * from_step;
    const std::byte* now = row + compressed_bytes(k);
    HELM_UNROLL
    for (int64_t i = I * kLines / kVectors; i < (I + 1) * kLines / kVectors; ++i) {
      const int64_t line = i * kLineBytes;
      ask<kAsk>(row + prefetch.far + line, now + line, kCompressedAskBytes, kCompressedNearBytes);
    }
  }
  template <Ask kAsk>
  HELM_INLINE void fetch_chunk(int64_t k, const Prefetch<kAsk>& prefetch) const {
    for (int r = 0; r < N; ++r) {
      each<kVectors>([&](auto which) HELM_LAMBDA_INLINE {
        fetch_vector<decltype(which)::value>(r, k, prefetch);
      });
    }
  }
  template <Ask kAsk>
  HELM_INLINE static void next_chunk(Prefetch<kAsk>& prefetch) {
    prefetch.far += kChunkBytes / kCompressedLineBytes * prefetch.step;
  }
  // What follows columns made plain was fetched with their chunk.
  template <int, Ask kAsk>
  HELM_INLINE void fetch(int64_t, Prefetch<kAsk>&) const {}
};

// Both kinds of weights give R rows, `step` rows apart, from column k0 on, to be read by one tile
// of T tokens, or `count` rows, of which columns [k0, k0 + n) are wanted, to be read by several
// tiles; of at most kCols columns at a time. The i-th of so many tiles is to fetch its share of
// what comes later: the next group of rows is `next` rows away.
template <class V, class Store>
struct StoredWeights {
  static constexpr int64_t kCols = INT64_MAX;
  static constexpr bool kReadsAfter = V::kRowsAdjoin;
  static constexpr int kTileTokens = V::kDirectTile;
  static constexpr const auto& kRowsPerTokens = V::kRowsPerTokens;
  static constexpr int kLongRowsPerTile = V::kLongRowsPerTile;

  const Store* w;  // [rows, cols]
  int64_t cols;

  template <int R>
  HELM_INLINE StoredRows<Store> rows_once(int64_t row, int64_t step, int64_t k0) const {
    return {w + row * cols + k0, step * cols};
  }
  template <int T>
  HELM_INLINE auto prefetch_once() const {
    if constexpr (V::kAskOnce) {
      return Prefetch<Ask::kOnce>{kAskBytes, kLineBytes};
    } else if constexpr (T == 1) {
      return Prefetch<Ask::kTwice>{kFarBytes, kLineBytes};
    } else {
      return Prefetch<Ask::kAgain>{3 * kAskBytes, kLineBytes};
    }
  }
  HELM_INLINE StoredRows<Store> rows(int64_t row, int64_t step, int64_t /*count*/, int64_t k0,
                                     int64_t /*n*/) const {
    return rows_once<1>(row, step, k0);
  }
  HELM_INLINE auto prefetch(int64_t /*n*/, int64_t next, int64_t i, int64_t tiles) const {
    const int64_t row_bytes = cols * static_cast<int64_t>(sizeof(Store));
    if constexpr (V::kRowsAdjoin) {  // there are two tiles at least: each asks for half the lines
      const int64_t bytes = next * row_bytes;
      const int64_t ahead = (kInOrderBytes + bytes - 1) / bytes * bytes;
      return Prefetch<Ask::kInOrder>{ahead + bytes * i / tiles,
                                     (next * kLineBytes + tiles - 1) / tiles};
    } else {
      return Prefetch<Ask::kTwice>{row_bytes + row_bytes * i / tiles,
                                   (kLineBytes + tiles - 1) / tiles};
    }
  }
};

template <class P>
struct CompressedWeights {
  using V = typename P::V;
  static constexpr int64_t kCols = 2048;  // half of L1 takes the rows of a direct tile
  static constexpr bool kReadsAfter = false;
  static constexpr int kTileTokens = P::kCompressedTile;
  static constexpr const auto& kRowsPerTokens = P::kCompressedRows;
  static constexpr int kLongRowsPerTile = P::kCompressedRows[1];

  CompressedMatrix m;
  uint16_t* plain;  // plain_bytes(count, n)

  template <int N>
  HELM_INLINE CompressedRows<P, N> rows_once(int64_t row, int64_t step, int64_t k0) const {
    constexpr int64_t kRowsAhead = kLineBytes / static_cast<int64_t>(sizeof(CompressedRow));
    const int64_t row_bytes = compressed_row_bytes(m.cols);
    CompressedRows<P, N> some;
    some.at = plain, some.step = plain_stride(kCols);
    some.from = m.chunks + row * row_bytes + compressed_bytes(k0);
    some.from_step = step * row_bytes;
    some.k0 = k0;
    HELM_UNROLL
    for (int r = 0; r < N; ++r) {
      const CompressedRow& header = m.rows[row + r * step];
      __builtin_prefetch(&header + kRowsAhead);
      some.high[r] = V::high_bytes(header.base());
      some.escapes[r] = m.escapes + header.first_escape;
      some.escape_count[r] = header.escapes();
    }
    return some;
  }
  PlainRows rows(int64_t row, int64_t step, int64_t count, int64_t k0, int64_t n) const {
    for (int64_t r = 0; r < count; ++r) {
      auto one = rows_once<1>(row + r * step, 0, k0);
      one.at += r * plain_stride(n);
      one.make_plain(0, n);
    }
    const int64_t row_bytes = compressed_row_bytes(m.cols);
    return {plain, plain_stride(n), m.chunks + row * row_bytes + compressed_bytes(k0),
            step * row_bytes};
  }
  template <int T>
  HELM_INLINE auto prefetch_once() const {
    constexpr bool kAgain = T * kChunk / P::kStep <= kOpsToAskAgain;
    if constexpr (V::kAskOnce) {
      return Prefetch<Ask::kOnce>{kCompressedAskBytes, kCompressedLineBytes};
    } else {
      return Prefetch<kAgain ? Ask::kAgain : Ask::kTwice>{3 * kCompressedAskBytes,
                                                          kCompressedLineBytes};
    }
  }
  // The same columns of the next group's rows.
  HELM_INLINE Prefetch<Ask::kTwice> prefetch(int64_t n, int64_t next, int64_t i,
                                             int64_t tiles) const {
    return {next * compressed_row_bytes(m.cols) + compressed_row_bytes(n) * i / tiles,
            (kCompressedLineBytes + tiles - 1) / tiles};
  }
};

}  // namespace
}  // namespace helm::cpu
