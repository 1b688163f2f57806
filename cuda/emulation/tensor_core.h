// Products of small matrices by a warp and copies that run beside it, emulated.
// cuda/hardware/tensor_core.h is the same for real devices and says what each means; the include
// path chooses.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>

namespace cuda_emulation {

inline float widen_f16(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}
inline float widen_bf16(unsigned bits) {
  return __uint_as_float(bits << 16);
}
inline uint16_t round_to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// c += a b by what the fragments of mma.m16n8k16 hold: products are exact, sums are of f32.
template <class Widen>
void multiply_fragments(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                        const Widen& widen) {
  const uint32_t words[] = {a[0], a[1], a[2], a[3], b0, b1};
  warp_publish(words, 6);
  const int group = lane() / 4;
  const auto half = [&](unsigned word, int k) { return widen(k % 2 ? word >> 16 : word & 0xffff); };
  for (int k = 0; k < 16; ++k) {
    const int holder = k % 8 / 2, upper = k / 8;
    float b[2];
    for (int n = 0; n < 2; ++n) {
      b[n] = half(warp_word(4 * (lane() % 4 * 2 + n) + holder, 4 + upper), k);
    }
    for (int row = 0; row < 2; ++row) {
      const float x = half(warp_word(4 * group + holder, 2 * upper + row), k);
      for (int n = 0; n < 2; ++n) c[2 * row + n] = fmaf(x, b[n], c[2 * row + n]);
    }
  }
}

// The word that this lane gets of matrix `i` lies at `row` and `row + 1`, or is one pair of a row.
inline void load_fragments(unsigned (&to)[4], const void* row, bool transposed) {
  check_aligned(static_cast<const uint4*>(row));
  uint32_t address[2];
  std::memcpy(address, &row, sizeof row);
  warp_publish(address, 2);
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int r, int column) {
      const uint32_t words[] = {warp_word(8 * i + r, 0), warp_word(8 * i + r, 1)};
      const uint16_t* from;
      std::memcpy(&from, words, sizeof from);
      return unsigned{from[column]};
    };
    const int group = lane() / 4, first = lane() % 4 * 2;
    to[i] = transposed ? element(first, group) | element(first + 1, group) << 16
                       : element(group, first) | element(group, first + 1) << 16;
  }
}

}  // namespace cuda_emulation

namespace helm::cuda {

inline unsigned pair_f16(float x, float y) {
  return __half_as_ushort(__float2half_rn(x)) |
         static_cast<unsigned>(__half_as_ushort(__float2half_rn(y))) << 16;
}
inline unsigned pair_bf16(float x, float y) {
  return cuda_emulation::round_to_bf16(x) | static_cast<unsigned>(cuda_emulation::round_to_bf16(y))
                                                << 16;
}

inline void multiply_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  cuda_emulation::multiply_fragments(c, a, b0, b1, cuda_emulation::widen_f16);
}
inline void multiply_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if (cuda_emulation::compute_capability() < 80) {
    cuda_emulation::kernel_fault("a product of bf16 matrices on a GPU older than sm_80");
  }
  cuda_emulation::multiply_fragments(c, a, b0, b1, cuda_emulation::widen_bf16);
}

inline void load_matrices(unsigned (&to)[4], const void* row) {
  cuda_emulation::load_fragments(to, row, false);
}
inline void load_matrices_transposed(unsigned (&to)[4], const void* row) {
  cuda_emulation::load_fragments(to, row, true);
}

// What is copied arrives no sooner than it is awaited, and what was there is lost at once.
inline void copy_async(void* shared, const void* global) {
  cuda_emulation::check_aligned(static_cast<const uint4*>(shared));
  cuda_emulation::check_aligned(static_cast<const uint4*>(global));
  if (cuda_emulation::compute_capability() < 80) {
    std::memcpy(shared, global, 16);
    return;
  }
  std::memset(shared, 0xff, 16);
  cuda_emulation::begin_copy({shared, global});
}
inline void commit_copies() {
  cuda_emulation::commit_copies();
}
template <int kGroups>
void await_copies() {
  cuda_emulation::AsyncCopy copy;
  while (cuda_emulation::next_copy(kGroups, &copy)) std::memcpy(copy.to, copy.from, 16);
}

inline int unknown(int x) {
  return x;
}

}  // namespace helm::cuda
