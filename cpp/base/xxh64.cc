#include "base/xxh64.h"

#include <array>
#include <bit>

namespace helm {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87U;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FU;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9U;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63U;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5U;

// Little-endian, whatever the machine is.
template <size_t kBytes>
uint64_t load(const std::byte* p) {
  uint64_t word = 0;
  for (size_t i = 0; i < kBytes; ++i) word |= std::to_integer<uint64_t>(p[i]) << (8 * i);
  return word;
}

uint64_t round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace

uint64_t xxh64(std::span<const std::byte> data, uint64_t seed) {
  const std::byte* p = data.data();
  const std::byte* end = p + data.size();
  uint64_t hash = seed + kPrime5;
  if (data.size() >= 32) {
    std::array<uint64_t, 4> lanes = {seed + kPrime1 + kPrime2, seed + kPrime2, seed,
                                     seed - kPrime1};
    for (; end - p >= 32; p += 32) {
      for (size_t i = 0; i < 4; ++i) lanes[i] = round(lanes[i], load<8>(p + 8 * i));
    }
    hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
           std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  hash += data.size();
  for (; end - p >= 8; p += 8) {
    hash = std::rotl(hash ^ round(0, load<8>(p)), 27) * kPrime1 + kPrime4;
  }
  if (end - p >= 4) {
    hash = std::rotl(hash ^ load<4>(p) * kPrime1, 23) * kPrime2 + kPrime3;
    p += 4;
  }
  for (; p < end; ++p) hash = std::rotl(hash ^ load<1>(p) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace helm
