// Products of many tokens in tile registers, bound by arithmetic: panels of weights are packed once
// and swept by tiles of tokens.
#pragma once

#include "cpu/kernels/matmul_panel.h"
#include "cpu/kernels/tiles.h"

namespace helm::cpu {
namespace {

inline constexpr int64_t kTilePanelRows = kTilePanelBytes / kTileBytes / kTileBlockSteps * kTile;

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

}  // namespace
}  // namespace helm::cpu
