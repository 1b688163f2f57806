// Stored elements widened to f32, warp sums, and choosing a kernel by dtype.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "helm/types.h"
#include "launch.h"

namespace helm::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kMostF16 = 65504.0f;

template <DType D>
using Store = std::conditional_t<D == DType::kF32, float, uint16_t>;

template <DType D>
__device__ __forceinline__ float widen(Store<D> x) {
  if constexpr (D == DType::kF32) {
    return x;
  } else if constexpr (D == DType::kF16) {
    return __half2float(__ushort_as_half(x));
  } else {
    return __uint_as_float(static_cast<unsigned>(x) << 16);
  }
}

// To nearest even. What exceeds f16 becomes its largest number: an infinity would make all that
// follows NaN. bf16 by integer arithmetic, which every architecture has.
template <DType D>
__device__ __forceinline__ Store<D> narrowed(float x) {
  if constexpr (D == DType::kF32) {
    return x;
  } else if constexpr (D == DType::kF16) {
    const float limited = x > kMostF16 ? kMostF16 : x < -kMostF16 ? -kMostF16 : x;
    return __half_as_ushort(__float2half_rn(limited));
  } else {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// Eight consecutive elements as stored.
inline constexpr int kPiece = 8;
template <DType D>
struct Piece {
  uint4 raw[kPiece * sizeof(Store<D>) / 16];

  __device__ __forceinline__ float operator[](int i) const {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Store<D>));
    const uint4& v = raw[i / (4 * kPerWord)];
    const int word_index = i / kPerWord % 4;
    const unsigned word = word_index == 0   ? v.x
                          : word_index == 1 ? v.y
                          : word_index == 2 ? v.z
                                            : v.w;
    if constexpr (D == DType::kF32) {
      return __uint_as_float(word);
    } else {
      return widen<D>(static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16));
    }
  }

  // Elements 4..7 before 0..3.
  __device__ __forceinline__ Piece swapped() const {
    if constexpr (D == DType::kF32) {
      return {{raw[1], raw[0]}};
    } else {
      return {{{raw[0].z, raw[0].w, raw[0].x, raw[0].y}}};
    }
  }
};

// Eight elements from an address aligned to 16 bytes.
template <DType D>
__device__ __forceinline__ Piece<D> load_piece(const Store<D>* p) {
  Piece<D> piece;
  const auto* from = reinterpret_cast<const uint4*>(p);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(piece) / 16); ++i) {
    piece.raw[i] = load_streaming(from + i);
  }
  return piece;
}

// The first `count` of eight elements, zeros after them. Any alignment, unless kVector; then the
// address is aligned to 16 bytes and `count` is 0 or 8 or more.
template <DType D, bool kVector>
__device__ __forceinline__ Piece<D> load_piece(const Store<D>* p, int64_t count) {
  Piece<D> piece{};
  if constexpr (kVector) {
    if (count > 0) piece = load_piece<D>(p);
  } else {
    auto* words = reinterpret_cast<unsigned*>(&piece);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (i >= count) break;
      if constexpr (D == DType::kF32) {
        words[i] = __float_as_uint(p[i]);
      } else {
        words[i / 2] |= static_cast<unsigned>(p[i]) << i % 2 * 16;
      }
    }
  }
  return piece;
}

// V consecutive elements, one or four; four are aligned to four. What other kernels write is read
// so, not by loads that the compiler may move before await_previous().
template <DType D, int V>
__device__ __forceinline__ void load_columns(const Store<D>* p, float (&v)[V]) {
  static_assert(V == 1 || V == 4);
  if constexpr (V == 1) {
    v[0] = widen<D>(*p);
  } else if constexpr (D == DType::kF32) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    v[0] = widen<D>(static_cast<uint16_t>(x.x)), v[1] = widen<D>(static_cast<uint16_t>(x.x >> 16));
    v[2] = widen<D>(static_cast<uint16_t>(x.y)), v[3] = widen<D>(static_cast<uint16_t>(x.y >> 16));
  }
}
template <DType D, int V>
__device__ __forceinline__ void store_columns(Store<D>* p, const float (&v)[V]) {
  static_assert(V == 1 || V == 4);
  if constexpr (V == 1) {
    *p = narrowed<D>(v[0]);
  } else if constexpr (D == DType::kF32) {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    const auto pair = [](float low, float high) {
      return unsigned{narrowed<D>(low)} | unsigned{narrowed<D>(high)} << 16;
    };
    *reinterpret_cast<uint2*>(p) = make_uint2(pair(v[0], v[1]), pair(v[2], v[3]));
  }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

inline bool aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// f(tag) with decltype(tag)::value == dtype, a constant.
template <class F>
void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32:
      return f(std::integral_constant<DType, DType::kF32>{});
    case DType::kF16:
      return f(std::integral_constant<DType, DType::kF16>{});
    case DType::kBF16:
      return f(std::integral_constant<DType, DType::kBF16>{});
    case DType::kI8:  // refused where attention is bound
      break;
  }
}

}  // namespace helm::cuda
