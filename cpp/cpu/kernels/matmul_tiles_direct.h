// Products of few tokens in tile registers, bound by memory: weights straight from where they lie,
// tokens packed once.
#pragma once

#include "cpu/kernels/matmul_panel.h"
#include "cpu/kernels/tiles.h"

namespace helm::cpu {
namespace {

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
  start_rows(m, 0, m.tokens, first, end - first);
  // A slice without rows packs too: the next one may count on it.
  for (int64_t k0 = 0; k0 < m.cols; k0 += block) {
    const int64_t cols = min_of(block, m.cols - k0);
    const FewTokens f{m, tile_scratch(m.scratch), k0, cols, (cols + kTileK - 1) / kTileK};
    if (cols < m.cols || !m.same_input) pack_tokens<Tiles>(f);
    int64_t r = first;
    for (; r + 2 * kTile <= end; r += 2 * kTile) few_rows<Tiles, 2>(f, w, r, 2 * kTile);
    for (; r < end; r += kTile) few_rows<Tiles, 1>(f, w, r, min_of(kTile, end - r));
  }
}

}  // namespace
}  // namespace helm::cpu
