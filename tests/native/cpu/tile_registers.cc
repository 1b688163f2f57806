// Shapes are checked at every use, as the processor does.
#include "tile_registers.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace helm::test {
namespace {

// Denormal inputs and results count as zero.
float flushed(float x) {
  return std::abs(x) < FLT_MIN ? 0.0f : x;
}

float widened(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return flushed(f);
}

}  // namespace

TileRegisters::Tile& TileRegisters::at(int tile) {
  if (!configured_) throw std::logic_error("a tile register is used without a configuration");
  Tile& t = tiles_[tile];
  if (t.rows == 0) throw std::logic_error("a tile register without a shape is used");
  return t;
}

void TileRegisters::configure(const void* shapes) {
  const auto* p = static_cast<const unsigned char*>(shapes);
  if (p[0] != 1 || p[1] != 0) throw std::logic_error("tiles of a palette other than 1");
  for (int i = 0; i < kCount; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, p + 16 + 2 * i, sizeof row_bytes);
    tiles_[i] = {p[48 + i], row_bytes, {}};
    if (p[48 + i] > kRows || row_bytes > kRowBytes) throw std::logic_error("a tile is too large");
  }
  configured_ = true;
}

void TileRegisters::load(int tile, const void* from, int64_t stride) {
  Tile& t = at(tile);
  std::memset(t.bytes, 0, sizeof t.bytes);
  for (int r = 0; r < t.rows; ++r) {
    std::memcpy(t.bytes[r], static_cast<const char*>(from) + r * stride,
                static_cast<size_t>(t.row_bytes));
  }
}

void TileRegisters::store(int tile, void* to, int64_t stride) {
  const Tile& t = at(tile);
  for (int r = 0; r < t.rows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, t.bytes[r], static_cast<size_t>(t.row_bytes));
  }
}

// For each row of A: the even and the odd elements along k are summed apart, in order, from zero;
// then both sums together are added to C. Every step rounds to the nearest f32, ties to even. A
// product of two bf16 is exact in f32, so that multiply and add make a fused multiply-add.
void TileRegisters::dot(int c, int a, int b) {
  Tile& sums = at(c);
  const Tile &rows = at(a), &pairs = at(b);
  if (rows.rows != sums.rows || pairs.row_bytes != sums.row_bytes ||
      pairs.rows != rows.row_bytes / 4) {
    throw std::logic_error("a product of tiles whose shapes do not fit");
  }
  const int columns = sums.row_bytes / 4;
  float right[2][kRows][kRowBytes / 4];
  for (int k = 0; k < pairs.rows; ++k) {
    for (int n = 0; n < columns; ++n) {
      uint16_t pair[2];
      std::memcpy(pair, pairs.bytes[k] + 4 * n, sizeof pair);
      right[0][k][n] = widened(pair[0]), right[1][k][n] = widened(pair[1]);
    }
  }
  for (int m = 0; m < sums.rows; ++m) {
    float sum[2][kRowBytes / 4] = {};
    for (int k = 0; k < pairs.rows; ++k) {
      uint16_t pair[2];
      std::memcpy(pair, rows.bytes[m] + 4 * k, sizeof pair);
      for (int half = 0; half < 2; ++half) {
        const float left = widened(pair[half]);
        for (int n = 0; n < columns; ++n) {
          sum[half][n] = flushed(sum[half][n] + left * right[half][k][n]);
        }
      }
    }
    float out[kRowBytes / 4];
    std::memcpy(out, sums.bytes[m], sizeof out);
    for (int n = 0; n < columns; ++n) {
      out[n] = flushed(flushed(out[n]) + flushed(sum[0][n] + sum[1][n]));
    }
    std::memcpy(sums.bytes[m], out, sizeof out);
  }
}

TileRegisters& tile_registers() {
  thread_local TileRegisters registers;
  return registers;
}

}  // namespace helm::test
