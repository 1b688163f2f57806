// Operands in tile registers (AMX-BF16, or what stands for it in tests) and the steps that multiply
// them. Knows the registers only as a policy, Tiles, and nothing of a whole product.
//
// A register holds 16 rows of 64 bytes. A product C += A B takes rows of 32 elements along k in A,
// pairs of them below each other in B (B(p, n) is the word of elements 2p and 2p + 1 of column n),
// and keeps 16 x 16 sums in f32.
#pragma once

#include "cpu/kernels/weight_rows.h"

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

}  // namespace
}  // namespace helm::cpu
