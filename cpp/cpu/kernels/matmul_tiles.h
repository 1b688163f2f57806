// Products with bf16 weights in tile registers (AMX-BF16, or what stands for it in tests), for any
// number of tokens. Knows the registers only as a policy, Tiles.
//
// A register holds 16 rows of 64 bytes. A product C += A B takes rows of 32 elements along k in A,
// pairs of them below each other in B (B(p, n) is the word of elements 2p and 2p + 1 of column n),
// and keeps 16 x 16 sums in f32. The order of the arithmetic is the same for every shape: C starts
// as [C] + [bias] and takes what each 32 elements of k add to it in order, zeros beyond the last.
// Products commute, so that either operand may be A. So C(t, r) has the same bits however tokens
// and rows are grouped.
#pragma once

#include "cpu/kernels/matmul_panel.h"

namespace helm::cpu {
namespace {

inline constexpr int64_t kPrefetchBytes = 512;  // ahead in each stream of weights

inline constexpr int64_t kTile = 16;  // rows of a register, columns of C
inline constexpr int64_t kTileK = 32;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTile * kTileRowBytes;
// Packed operands, in L2: processors with AMX have 2 MiB.
inline constexpr int64_t kTilePanelBytes = int64_t{512} << 10;
// Of k per sweep of many tokens: 32 of them then take 32 KiB of an L1 of 48 KiB.
inline constexpr int64_t kTileBlock = 512;
inline constexpr int64_t kTileBlockSteps = kTileBlock / kTileK;
inline constexpr int64_t kTilePanelRows = kTilePanelBytes / kTileBytes / kTileBlockSteps * kTile;
// Up to here weights are read from memory once and as stored; more tokens are worth packing them.
inline constexpr int64_t kTileFewTokens = 64;

// Up to 16 x 16 words of 4 bytes, rows `stride` bytes apart.
template <class Byte>
struct Words {
  Byte* at;
  int64_t stride;
  int64_t rows;
  int64_t cols;
};

template <class Byte>
Words<Byte> whole_tile(Byte* at) {
  return {at, kTileRowBytes, kTile, kTile};
}

struct TileScratch {
  char* panel;  // packed operand
  char* rows;   // [2][kTileBlockSteps] tiles of rows along k
  char* sums;   // [4] tiles of C
};

inline TileScratch tile_scratch(void* base) {
  char* panel = static_cast<char*>(base);
  char* rows = panel + kTilePanelBytes;
  return {panel, rows, rows + 2 * kTileBlockSteps * kTileBytes};
}

inline constexpr int64_t kTileScratchBytes =
    kTilePanelBytes + 2 * kTileBlockSteps * kTileBytes + 4 * kTileBytes;
// With rows that are made plain.
template <class P>
constexpr int64_t kCompressedTileScratchBytes =
    kTileScratchBytes + plain_bytes(2 * kTile, CompressedWeights<P>::kCols);

// One operand of a product: a tile for every 32 elements of k, and the same for its next 16 rows.
struct TileRun {
  const char* at;
  int64_t stride;  // bytes between the rows of a tile
  int64_t step;    // bytes to the next tile along k
  int64_t second;  // bytes to the tile of the next 16 rows

  TileRun after(int64_t steps) const { return {at + steps * step, stride, step, second}; }
};

// body(i, j) for the tiles of C in use; tile (i, j) is register 2i + j, A's are 4 and 5, B's 6
// and 7.
template <int I, int J, class Body>
HELM_INLINE void each_tile(Body body) {
  body(Count<0>{}, Count<0>{});
  if constexpr (J > 1) body(Count<0>{}, Count<1>{});
  if constexpr (I > 1) body(Count<1>{}, Count<0>{});
  if constexpr (I > 1 && J > 1) body(Count<1>{}, Count<1>{});
}

template <class I, class J>
inline constexpr int kSumTile = 2 * I::value + J::value;

// C(i, j) += A(i) B(j) for I tiles of rows and J of columns. Where `ahead` is not 0, the lines that
// many bytes after A's are asked for: to L2, since rows that lie a power of two apart share few
// sets of L1.
template <class Tiles, int I, int J>
void multiply_tiles(TileRun a, TileRun b, int64_t steps, int64_t ahead) {
  for (int64_t s = 0; s < steps; ++s, a.at += a.step, b.at += b.step) {
    if (ahead != 0) {
      for (int64_t r = 0; r < I * kTile; ++r) {
        __builtin_prefetch(a.at + r * a.stride + ahead, 0, 2);
      }
    }
    Tiles::template load<4>(a.at, a.stride);
    if constexpr (I > 1) Tiles::template load<5>(a.at + a.second, a.stride);
    Tiles::template load<6>(b.at, b.stride);
    if constexpr (J > 1) Tiles::template load<7>(b.at + b.second, b.stride);
    each_tile<I, J>([](auto i, auto j) HELM_LAMBDA_INLINE {
      Tiles::template dot<kSumTile<decltype(i), decltype(j)>, 4 + decltype(i)::value,
                          6 + decltype(j)::value>();
    });
  }
}

// Rows and columns of a tile of weights, zeros beyond them.
inline void copy_tile(const uint16_t* w, int64_t stride, int64_t rows, int64_t cols, char* out) {
  constexpr int64_t kAhead = kPrefetchBytes / static_cast<int64_t>(sizeof(uint16_t));
  __builtin_memset(out, 0, kTileBytes);
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_prefetch(w + r * stride + kAhead, 0, 2);
    __builtin_memcpy(out + r * kTileRowBytes, w + r * stride,
                     static_cast<size_t>(cols) * sizeof(uint16_t));
  }
}

// Rows of activations, rounded, as tiles along k; of the last tile zeros beyond `cols`. Row by row,
// as memory likes to be read.
template <class Tiles>
void round_tiles(const float* a, int64_t stride, int64_t rows, int64_t cols, char* out) {
  for (int64_t r = 0; r < rows; ++r, a += stride, out += kTileRowBytes) {
    char* to = out;
    for (int64_t k = 0; k < cols; k += kTileK, to += kTileBytes) {
      Tiles::round(a + k, min_of(kTileK, cols - k), to);
    }
  }
}

// A few tokens and what they share over the rows of one block of k. The weights are A, straight
// from memory: nothing of them is packed. The tokens are B: [tiles][steps] of pairs; one alone is a
// B of a single column, which is its row as it is.
struct FewTokens {
  const MatmulArgs& m;
  TileScratch scratch;
  int64_t k0, cols, steps;

  TileRun tokens(int64_t first) const {
    if (m.tokens == 1) return {scratch.panel, 4, kTileRowBytes, 0};
    const int64_t run = steps * kTileBytes;
    return {scratch.panel + first / kTile * run, kTileRowBytes, kTileBytes, run};
  }
};

template <class Tiles>
void pack_tokens(const FewTokens& f) {
  const MatmulArgs& m = f.m;
  char* out = f.scratch.panel;
  if (m.tokens == 1) {
    for (int64_t k = 0; k < f.cols; k += kTileK, out += kTileRowBytes) {
      Tiles::round(m.a + f.k0 + k, min_of(kTileK, f.cols - k), out);
    }
    return;
  }
  for (int64_t t = 0; t < m.tokens; t += kTile) {
    const int64_t tokens = min_of(kTile, m.tokens - t);
    for (int64_t k = 0; k < f.cols; k += kTileBlock) {
      const int64_t cols = min_of(kTileBlock, f.cols - k);
      round_tiles<Tiles>(m.a + t * m.a_stride + f.k0 + k, m.a_stride, tokens, cols, f.scratch.rows);
      const char* rounded = f.scratch.rows;
      for (int64_t i = 0; i < cols; i += kTileK, rounded += kTileBytes, out += kTileBytes) {
        Tiles::transpose(Words<const char>{rounded, kTileRowBytes, tokens, kTile}, whole_tile(out));
      }
    }
  }
}

// Rows of weights, from the first column of a block of k on, and which they are.
struct TileRows {
  const uint16_t* at;
  int64_t step;  // elements
  int64_t first;
  int64_t count;
};

// Rows of weights, I tiles, times up to J tiles of tokens from `token` on. Tiles of C are turned
// over, as its rows are tokens.
template <class Tiles, int I, int J>
void few_block(const FewTokens& f, TileRows w, int64_t token) {
  const MatmulArgs& m = f.m;
  const int64_t row = w.first, rows = w.count;
  const int64_t row_bytes = w.step * static_cast<int64_t>(sizeof(uint16_t));
  const auto part_of_c = [&](int64_t i, int64_t j) {
    float* c = m.c + (token + j * kTile) * m.c_stride + row + i * kTile;
    return Words<char>{reinterpret_cast<char*>(c), m.c_stride * static_cast<int64_t>(sizeof(float)),
                       min_of(kTile, m.tokens - token - j * kTile),
                       min_of(kTile, rows - i * kTile)};
  };
  each_tile<I, J>([&](auto i, auto j) HELM_LAMBDA_INLINE {
    constexpr int kSum = kSumTile<decltype(i), decltype(j)>;
    const Words<char> c = part_of_c(i.value, j.value);
    char* sums = f.scratch.sums + kSum * kTileBytes;
    Tiles::transpose(Words<const char>{c.at, c.stride, c.rows, c.cols}, whole_tile(sums));
    Tiles::template load<kSum>(sums, kTileRowBytes);
  });
  const TileRun a{reinterpret_cast<const char*>(w.at), row_bytes, kTileRowBytes, kTile * row_bytes};
  const TileRun b = f.tokens(token);
  // The first tokens fetch the weights; near the end of the rows, the start of the next ones.
  constexpr int64_t kAheadSteps = kPrefetchBytes / kTileRowBytes;
  const int64_t direct = rows == I * kTile ? f.cols / kTileK : 0;
  const int64_t before = max_of(0, direct - kAheadSteps);
  const int64_t ahead = token == 0 ? kPrefetchBytes : 0;
  const int64_t jump = token == 0 ? I * kTile * row_bytes - f.steps * kTileRowBytes : 0;
  multiply_tiles<Tiles, I, J>(a, b, before, ahead);
  multiply_tiles<Tiles, I, J>(a.after(before), b.after(before), direct - before, ahead + jump);
  for (int64_t s = direct; s < f.steps; ++s) {  // ragged rows, or the last columns
    for (int64_t i = 0; i < I; ++i) {
      copy_tile(w.at + i * kTile * w.step + s * kTileK, w.step, min_of(kTile, rows - i * kTile),
                min_of(kTileK, f.cols - s * kTileK), f.scratch.rows + i * kTileBytes);
    }
    const TileRun copied{f.scratch.rows, kTileRowBytes, 0, kTileBytes};
    multiply_tiles<Tiles, I, J>(copied, b.after(s), 1, 0);
  }
  each_tile<I, J>([&](auto i, auto j) HELM_LAMBDA_INLINE {
    constexpr int kSum = kSumTile<decltype(i), decltype(j)>;
    char* sums = f.scratch.sums + kSum * kTileBytes;
    Tiles::template store<kSum>(sums, kTileRowBytes);
    Tiles::transpose(whole_tile<const char>(sums), part_of_c(i.value, j.value));
  });
}

template <class Tiles, int I, class Weights>
void few_rows(const FewTokens& f, const Weights& weights, int64_t row, int64_t rows) {
  const auto stored = weights.rows(row, 1, rows, f.k0, f.cols);
  const TileRows w{stored.at, stored.step, row, rows};
  for (int64_t t = 0; t < f.m.tokens; t += 2 * kTile) {
    if (f.m.tokens - t > kTile) {
      few_block<Tiles, I, 2>(f, w, t);
    } else {
      few_block<Tiles, I, 1>(f, w, t);
    }
  }
}

template <class Tiles, class Weights>
void few_tokens_in_tiles(const MatmulArgs& m, const Weights& w) {
  const int64_t tiles = (m.tokens + kTile - 1) / kTile;
  const int64_t step_bytes = m.tokens == 1 ? kTileRowBytes : tiles * kTileBytes;
  const int64_t block = min_of(kTilePanelBytes / step_bytes * kTileK, Weights::kCols);
  const int64_t pairs = (m.rows + 2 * kTile - 1) / (2 * kTile);  // of tiles of rows
  const int64_t first = pairs * m.slice / m.slices * 2 * kTile;
  const int64_t end = min_of(m.rows, pairs * (m.slice + 1) / m.slices * 2 * kTile);
  if (first == end) return;
  start_rows(m, 0, m.tokens, first, end - first);
  for (int64_t k0 = 0; k0 < m.cols; k0 += block) {
    const int64_t cols = min_of(block, m.cols - k0);
    const FewTokens f{m, tile_scratch(m.scratch), k0, cols, (cols + kTileK - 1) / kTileK};
    pack_tokens<Tiles>(f);
    int64_t r = first;
    for (; r + 2 * kTile <= end; r += 2 * kTile) few_rows<Tiles, 2>(f, w, r, 2 * kTile);
    for (; r < end; r += kTile) few_rows<Tiles, 1>(f, w, r, min_of(kTile, end - r));
  }
}

// Rows of weights from r0 on as B, one block of k: [tiles of rows][steps] of pairs.
template <class Tiles, class Weights>
void pack_weights(const Weights& w, int64_t r0, int64_t rows, int64_t k0, int64_t cols, char* spare,
                  char* out) {
  for (int64_t r = 0; r < rows; r += kTile) {
    const int64_t count = min_of(kTile, rows - r);
    const auto stored = w.rows(r0 + r, 1, count, k0, cols);
    for (int64_t k = 0; k < cols; k += kTileK, out += kTileBytes) {
      const uint16_t* from = stored.at + k;
      Words<const char> words{reinterpret_cast<const char*>(from),
                              stored.step * static_cast<int64_t>(sizeof(uint16_t)), count, kTile};
      if (cols - k < kTileK) {  // half a word at the end may be the end of memory
        copy_tile(from, stored.step, count, cols - k, spare);
        words = whole_tile<const char>(spare);
      }
      Tiles::transpose(words, whole_tile(out));
    }
  }
}

// Copies between C and a whole tile; beyond the part of C that there is, zeros.
inline void tile_from(const float* c, int64_t stride, int64_t tokens, int64_t rows, char* tile) {
  __builtin_memset(tile, 0, kTileBytes);
  for (int64_t t = 0; t < tokens; ++t) {
    __builtin_memcpy(tile + t * kTileRowBytes, c + t * stride,
                     static_cast<size_t>(rows) * sizeof(float));
  }
}
inline void tile_to(const char* tile, int64_t stride, int64_t tokens, int64_t rows, float* c) {
  for (int64_t t = 0; t < tokens; ++t) {
    __builtin_memcpy(c + t * stride, tile + t * kTileRowBytes,
                     static_cast<size_t>(rows) * sizeof(float));
  }
}

// A part of C that I x J tiles hold.
struct PartOfC {
  float* c;  // [tokens, rows], rows `stride` elements apart
  int64_t stride;
  int64_t tokens;
  int64_t rows;
  char* spare;  // [4] tiles
};

// C += A B, the tokens being A. Tiles that lie in C entirely are loaded from there.
template <class Tiles, int I, int J>
void many_block(const PartOfC& p, TileRun a, TileRun b, int64_t steps) {
  const int64_t stride_bytes = p.stride * static_cast<int64_t>(sizeof(float));
  const auto each = [&](auto whole, auto part) HELM_LAMBDA_INLINE {
    each_tile<I, J>([&](auto i, auto j) HELM_LAMBDA_INLINE {
      float* c = p.c + i.value * kTile * p.stride + j.value * kTile;
      const int64_t tokens = min_of(kTile, p.tokens - i.value * kTile);
      const int64_t rows = min_of(kTile, p.rows - j.value * kTile);
      constexpr Count<kSumTile<decltype(i), decltype(j)>> sum{};
      if (tokens == kTile && rows == kTile) return whole(sum, c);
      part(sum, c, tokens, rows, p.spare + sum.value * kTileBytes);
    });
  };
  each([&](auto sum, const float* c)
           HELM_LAMBDA_INLINE { Tiles::template load<decltype(sum)::value>(c, stride_bytes); },
       [&](auto sum, const float* c, int64_t tokens, int64_t rows, char* tile) HELM_LAMBDA_INLINE {
         tile_from(c, p.stride, tokens, rows, tile);
         Tiles::template load<decltype(sum)::value>(tile, kTileRowBytes);
       });
  multiply_tiles<Tiles, I, J>(a, b, steps, 0);
  each([&](auto sum, float* c)
           HELM_LAMBDA_INLINE { Tiles::template store<decltype(sum)::value>(c, stride_bytes); },
       [&](auto sum, float* c, int64_t tokens, int64_t rows, char* tile) HELM_LAMBDA_INLINE {
         Tiles::template store<decltype(sum)::value>(tile, kTileRowBytes);
         tile_to(tile, p.stride, tokens, rows, c);
       });
}

// Rows of activations of which the first `lines` cache lines are wanted soon.
struct NextRows {
  const float* a;
  int64_t stride;
  int64_t rows;
  int64_t lines;

  void fetch(int64_t count) {
    for (; count > 0 && rows > 0; --count, --rows, a += stride) {
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(a + i * kTile, 0, 2);
    }
  }
};

// Up to 32 tokens against a packed panel of weights; meanwhile the next ones are fetched.
template <class Tiles, int I>
void sweep_tiles(PartOfC p, TileRun a, TileRun b, int64_t steps, NextRows next) {
  const int64_t share = next.rows * 2 * kTile / p.rows + 1;
  for (int64_t rows = p.rows; rows > 0; rows -= 2 * kTile) {
    next.fetch(share);
    p.rows = rows;
    if (rows > kTile) {
      many_block<Tiles, I, 2>(p, a, b, steps);
    } else {
      many_block<Tiles, I, 1>(p, a, b, steps);
    }
    p.c += 2 * kTile;
    b.at += 2 * b.second;
  }
}

// The weights are B, packed once per panel and swept by every 32 tokens: so C needs no turning.
template <class Tiles, class Weights>
void many_tokens_in_tiles(const MatmulArgs& m, const Weights& w) {
  const TileScratch s = tile_scratch(m.scratch);
  for (int64_t r0 = 0; r0 < m.rows; r0 += kTilePanelRows) {
    const int64_t rows = min_of(kTilePanelRows, m.rows - r0);
    for (int64_t k0 = 0; k0 < m.cols; k0 += kTileBlock) {
      const int64_t cols = min_of(kTileBlock, m.cols - k0), steps = (cols + kTileK - 1) / kTileK;
      const int64_t run = steps * kTileBytes;
      pack_weights<Tiles>(w, r0, rows, k0, cols, s.sums, s.panel);
      for (int64_t t = 0; t < m.tokens; t += 2 * kTile) {
        const int64_t tokens = min_of(2 * kTile, m.tokens - t);
        if (k0 == 0) start_rows(m, t, tokens, r0, rows);
        for (int64_t i = 0; i < tokens; i += kTile) {
          round_tiles<Tiles>(m.a + (t + i) * m.a_stride + k0, m.a_stride, min_of(kTile, tokens - i),
                             cols, s.rows + i / kTile * run);
        }
        const PartOfC p{m.c + t * m.c_stride + r0, m.c_stride, tokens, rows, s.sums};
        const TileRun a{s.rows, kTileRowBytes, kTileBytes, run};
        const TileRun b{s.panel, kTileRowBytes, kTileBytes, run};
        const int64_t left = m.tokens - t - tokens;
        const NextRows next{m.a + (t + tokens) * m.a_stride + k0, m.a_stride,
                            min_of(2 * kTile, left), cols / kTile};
        tokens > kTile ? sweep_tiles<Tiles, 2>(p, a, b, steps, next)
                       : sweep_tiles<Tiles, 1>(p, a, b, steps, next);
      }
    }
  }
}

// C(t, r) of kernels.h, A rounded to bf16. A register keeps its shape for the whole call: making
// and dropping it takes some hundred cycles, the least piece of weights several thousand to read. A
// thread that holds none saves none when it gives up its core.
template <class Tiles, class Weights>
void matmul_in_tiles_of(const MatmulArgs& m, const Weights& w) {
  Tiles::begin(m.tokens == 1 ? 1 : kTile);
  m.tokens <= kTileFewTokens ? few_tokens_in_tiles<Tiles>(m, w) : many_tokens_in_tiles<Tiles>(m, w);
  Tiles::end();
}

// V: the tier's vectors.
template <class Tiles, class V>
void matmul_in_tiles(const MatmulArgs& m) {
  matmul_in_tiles_of<Tiles>(m,
                            StoredWeights<V, uint16_t>{static_cast<const uint16_t*>(m.w), m.cols});
}

// The rows are made plain behind the other scratch. P: products of the vectors that do it.
template <class Tiles, class P>
void matmul_compressed_in_tiles(const MatmulArgs& m, const CompressedMatrix& w) {
  char* plain = static_cast<char*>(m.scratch) + kTileScratchBytes;
  matmul_in_tiles_of<Tiles>(m, CompressedWeights<P>{w, reinterpret_cast<uint16_t*>(plain)});
}

}  // namespace
}  // namespace helm::cpu
