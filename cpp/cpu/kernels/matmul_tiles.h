// Matrix product with bf16 weights in tile registers, for any number of tokens. The order of the
// arithmetic is the same for every shape: C starts as [C] + [bias] and takes what each 32 elements
// of k add to it in order, zeros beyond the last. Products commute, so that either operand may be
// A. So C(t, r) has the same bits however tokens and rows are grouped.
#pragma once

#include "cpu/kernels/matmul_tiles_direct.h"
#include "cpu/kernels/matmul_tiles_panel.h"

namespace helm::cpu {
namespace {

// Up to here weights are read from memory once and as stored; more tokens are worth packing them.
inline constexpr int64_t kTileFewTokens = 64;

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
