// Half precision as the kernels use it: storage and conversion, no arithmetic.
#pragma once

#include <bit>
#include <cstdint>

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) {
  return {bits};
}
inline uint16_t __half_as_ushort(__half h) {
  return h.bits;
}
inline float __half2float(__half h) {
  return static_cast<float>(std::bit_cast<_Float16>(h.bits));
}
inline __half __float2half_rn(float x) {
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}
