// A row of bf16 weights in the form of compressed.h, for products of P.
#pragma once

#include "cpu/kernels/compressed.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

// The least of the eight neighbouring values that most high bytes have, but for their sign. In long
// rows every fourth weight is asked: others cost escapes, not exactness. Several counts of each
// value, since a count that was just written is slow to read.
inline uint8_t best_base(const uint16_t* w, int64_t cols) {
  constexpr int kCounts = 4, kValues = 128, kKept = 8;
  uint32_t counts[kCounts][kValues] = {};
  const int64_t step = cols < 512 ? 1 : 4;
  const auto count = [&](int at, int64_t k) { ++counts[at][w[k] >> 8 & 0x7f]; };
  int64_t k = 0;
  for (; k + (kCounts - 1) * step < cols; k += kCounts * step) {
    for (int i = 0; i < kCounts; ++i) count(i, k + i * step);
  }
  for (; k < cols; k += step) count(0, k);
  int64_t covered = 0, most = -1;
  uint8_t best = 0;
  const auto found = [&](int value) {
    int64_t sum = 0;
    for (const auto& each : counts) sum += each[value];
    return sum;
  };
  for (int value = 0; value < kValues; ++value) {
    covered += found(value);
    if (value >= kKept) covered -= found(value - kKept);
    if (value >= kKept - 1 && covered > most) {
      most = covered, best = static_cast<uint8_t>(value - (kKept - 1));
    }
  }
  return best;
}

// Writes a chunk of kChunk weights; returns whether any of them is an escape.
template <class P>
bool compress_chunk(const uint16_t* w, uint8_t base, uint8_t* out) {
  uint8_t low[kChunk], code[kChunk];
  uint8_t beyond = 0;
  for (int i = 0; i < kChunk; ++i) {
    const auto high = static_cast<uint8_t>(w[i] >> 8);
    const auto place = static_cast<uint8_t>((high & 0x7f) - base);
    low[i] = static_cast<uint8_t>(w[i]);
    code[i] = static_cast<uint8_t>((place & 7) | (high >> 4 & 8));
    beyond = static_cast<uint8_t>(beyond | (place & 0xf8));
  }
  constexpr int kTogether = 4;  // weights whose bytes adjoin, whatever the place
  uint8_t codes[2][kCodeBytes];
  HELM_UNROLL
  for (int k = 0; k < kChunk; k += kTogether) {
    const Place place = P::place(k);
    __builtin_memcpy(out + place.low, low + k, kTogether);
    __builtin_memcpy(codes[place.shift / 4] + place.code, code + k, kTogether);
  }
  for (int i = 0; i < kCodeBytes; ++i) {
    out[i] = static_cast<uint8_t>(codes[0][i] | codes[1][i] << 4);
  }
  return beyond != 0;
}

// KernelTable::compress_row
template <class P>
int64_t compress_row(const uint16_t* w, int64_t cols, std::byte* chunks, uint8_t* base,
                     Escape* escapes, int64_t room) {
  *base = best_base(w, cols);
  int64_t found = 0;
  for (int64_t k = 0; k < cols; k += kChunk, chunks += kChunkBytes) {
    const uint16_t* from = w + k;
    const int64_t n = min_of(kChunk, cols - k);
    uint16_t padded[kChunk];
    if (n < kChunk) {
      for (int i = 0; i < kChunk; ++i) padded[i] = i < n ? from[i] : uint16_t(*base << 8);
      from = padded;
    }
    if (!compress_chunk<P>(from, *base, reinterpret_cast<uint8_t*>(chunks))) continue;
    for (int i = 0; i < n; ++i) {
      if (static_cast<uint8_t>((from[i] >> 8 & 0x7f) - *base) < 8) continue;
      if (found < room) escapes[found] = {static_cast<uint16_t>(k + i), from[i]};
      ++found;
    }
  }
  return found;
}

}  // namespace
}  // namespace helm::cpu
