// Whether floats are finite, told by the bits of their exponents. Knows no formats.
#pragma once

#include <cstdint>

namespace helm {

inline constexpr uint16_t kExponentF16 = 0x7c00;
inline constexpr uint16_t kExponentBF16 = 0x7f80;
inline constexpr uint32_t kExponentF32 = 0x7f800000;

// bits: of n floats. exponent: its bits, all of which NaN and infinity have.
template <typename T>
bool all_finite(const T* bits, int64_t n, T exponent) {
  bool found = false;
  for (int64_t i = 0; i < n; ++i) found |= (bits[i] & exponent) == exponent;
  return !found;
}

}  // namespace helm
