// What kernels see: index variables, vector types, barriers, warp exchanges and intrinsics.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
// One block at a time runs on a thread of the host, its fibers see the same copy.
#define __shared__ static thread_local

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

inline void __syncthreads() {
  cuda_emulation::block_barrier();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_emulation::warp_exchange(cuda_emulation::WarpOp::kSync, mask, 0, 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(
      cuda_emulation::warp_exchange(cuda_emulation::WarpOp::kBallot, mask, predicate != 0, 0));
}
inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

namespace cuda_emulation {

template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(WarpOp::kShuffle, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
void check_aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) kernel_fault("misaligned load");
}

}  // namespace cuda_emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = cuda_emulation::lane();
  return cuda_emulation::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = cuda_emulation::lane(), source = lane ^ lane_mask;
  return cuda_emulation::shuffle(mask, value,
                                 source < (lane & ~(width - 1)) + width ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_emulation::lane();
  const bool inside = (lane & (width - 1)) + static_cast<int>(delta) < width;
  return cuda_emulation::shuffle(mask, value, inside ? lane + static_cast<int>(delta) : lane);
}

template <class T>
T __ldg(const T* p) {
  cuda_emulation::check_aligned(p);
  return *p;
}

inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}
// c + the sum of four products of signed bytes
inline int __dp4a(int a, int b, int c) {
  for (int shift = 0; shift < 32; shift += 8) {
    c += static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift);
  }
  return c;
}
// Four of the eight bytes of x and y, x first, by the low three bits of each nibble of a selector.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned chosen = selector >> 4 * i & 7;
    out |= static_cast<unsigned>(bytes >> 8 * chosen & 0xff) << 8 * i;
  }
  return out;
}
inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
