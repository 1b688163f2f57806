// The tile registers of AMX-BF16 in plain C++, after Intel's definition of the instructions. Knows
// nothing of products.
#pragma once

#include <cstdint>

namespace helm::test {

// Palette 1. Misuse, which the processor answers with an exception, throws std::logic_error.
class TileRegisters {
 public:
  static constexpr int kCount = 8, kRows = 16, kRowBytes = 64;

  // From the 64 bytes that ldtilecfg reads; zeros the registers.
  void configure(const void* shapes);
  void release() { configured_ = false; }
  bool configured() const { return configured_; }

  void load(int tile, const void* from, int64_t stride);  // stride in bytes
  void store(int tile, void* to, int64_t stride);
  void dot(int c, int a, int b);  // tdpbf16ps: C += A B

 private:
  struct Tile {
    int rows, row_bytes;
    alignas(64) unsigned char bytes[kRows][kRowBytes];
  };
  Tile& at(int tile);

  bool configured_ = false;
  Tile tiles_[kCount];
};

// Those of the thread.
TileRegisters& tile_registers();

}  // namespace helm::test
