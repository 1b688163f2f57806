// Tile registers of AMX-BF16 and what surrounds them in AVX-512. Knows nothing of products.
#pragma once

#include "cpu/kernels/dot_avx512bf16.h"
#include "cpu/kernels/tiles.h"

namespace helm::cpu {
namespace {

// Written in assembly: GCC's intrinsics take numbers of registers only as literals, not as template
// arguments, and do not say that they read memory.
struct AmxTiles {
  // Palette 1: bytes per row and rows of each register.
  struct alignas(64) Shape {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // C and B with so many columns of words.
  static void begin(int64_t columns) {
    Shape shape;
    for (int i = 0; i < 8; ++i) {
      const bool a = i == 4 || i == 5;
      shape.row_bytes[i] = static_cast<uint16_t>(a ? kTileRowBytes : 4 * columns);
      shape.rows[i] = kTile;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
  }
  static void end() { __asm__ volatile("tilerelease"); }

  template <int I>
  HELM_INLINE static void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(I) : "memory");
  }
  template <int I>
  HELM_INLINE static void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(I) : "memory");
  }
  // C += A B, A rows along k, B pairs of k.
  template <int C, int A, int B>
  HELM_INLINE static void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }

  // 32 elements of bf16, zeros from the n-th on.
  HELM_INLINE static void round(const float* a, int64_t n, char* out) {
    _mm512_storeu_si512(out, (__m512i)(n == kTileK ? DotBf16::load_a(a) : DotBf16::load_a_n(a, n)));
  }

  // to(j, i) = from(i, j), zero where `from` has no such word.
  static void transpose(Words<const char> from, Words<char> to) {
    VecAvx512::F x[kTile];
    HELM_UNROLL
    for (int i = 0; i < kTile; ++i) {
      x[i] = VecAvx512::zero();
      if (i < from.rows) {
        x[i] = _mm512_maskz_loadu_ps(mask(from.cols), from.at + i * from.stride);
      }
    }
    VecAvx512::transpose(x);
    HELM_UNROLL
    for (int i = 0; i < kTile; ++i) {
      if (i < to.rows) _mm512_mask_storeu_ps(to.at + i * to.stride, mask(to.cols), x[i]);
    }
  }

 private:
  HELM_INLINE static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
};

}  // namespace
}  // namespace helm::cpu
