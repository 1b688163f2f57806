// The amx tier's products in plain C++.
#include <algorithm>
#include <cstring>

#include "cpu/kernels/matmul_tiles.h"
#include "cpu/kernels/vec_scalar.h"
#include "tile_registers.h"
#include "tile_tables.h"

namespace helm::test {
namespace {

struct EmulatedTiles {
  static void begin(int64_t columns) {
    unsigned char shapes[64] = {1};
    for (int i = 0; i < TileRegisters::kCount; ++i) {
      shapes[16 + 2 * i] = static_cast<unsigned char>(i == 4 || i == 5 ? 64 : 4 * columns);
      shapes[48 + i] = 16;
    }
    tile_registers().configure(shapes);
  }
  static void end() { tile_registers().release(); }

  template <int I>
  static void load(const void* p, int64_t stride) {
    tile_registers().load(I, p, stride);
  }
  template <int I>
  static void store(void* p, int64_t stride) {
    tile_registers().store(I, p, stride);
  }
  template <int C, int A, int B>
  static void dot() {
    tile_registers().dot(C, A, B);
  }

  static void round(const float* a, int64_t n, char* out) {
    uint16_t rounded[cpu::kTileK] = {};
    for (int64_t i = 0; i < n; ++i) rounded[i] = cpu::bf16_from_f32(a[i]);
    std::memcpy(out, rounded, sizeof rounded);
  }

  static void transpose(cpu::Words<const char> from, cpu::Words<char> to) {
    uint32_t words[cpu::kTile][cpu::kTile] = {};
    for (int64_t i = 0; i < from.rows; ++i) {
      for (int64_t j = 0; j < from.cols; ++j) {
        std::memcpy(&words[j][i], from.at + i * from.stride + 4 * j, 4);
      }
    }
    for (int64_t j = 0; j < to.rows; ++j) {
      std::memcpy(to.at + j * to.stride, words[j], static_cast<size_t>(4 * to.cols));
    }
  }
};

// What makes compressed weights plain.
using Dot = cpu::Dot<cpu::VecScalar, DType::kBF16>;

int64_t scratch_bytes(int64_t head_dim) {
  return std::max(cpu::kCompressedTileScratchBytes<Dot>,
                  cpu::kernels_scalar()->scratch_bytes(head_dim));
}

}  // namespace

const cpu::KernelTable& emulated_amx() {
  static const cpu::KernelTable table = [] {
    constexpr int kBf16 = static_cast<int>(DType::kBF16);
    cpu::KernelTable t = *cpu::kernels_scalar();
    t.name = "emulated amx";
    t.scratch_bytes = scratch_bytes;
    t.matmul[kBf16] = cpu::matmul_in_tiles<EmulatedTiles, cpu::VecScalar>;
    t.matmul_compressed = cpu::matmul_compressed_in_tiles<EmulatedTiles, Dot>;
    t.direct_tokens[kBf16] = INT64_MAX;
    t.activations[kBf16] = DType::kBF16;
    return t;
  }();
  return table;
}

}  // namespace helm::test
