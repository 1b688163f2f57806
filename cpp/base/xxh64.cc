#include "base/xxh64.h"

#include <algorithm>
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

Xxh64::Xxh64(uint64_t seed)
    : seed_(seed), lanes_{seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1} {}

void Xxh64::mix(const std::byte* block) {
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i] = round(lanes_[i], load<8>(block + 8 * i));
}

void Xxh64::add(std::span<const std::byte> data) {
  const size_t held = bytes_ % kBlock;
  bytes_ += data.size();
  if (held > 0) {
    const size_t taken = std::min(kBlock - held, data.size());
    std::copy_n(data.begin(), taken, rest_.begin() + held);
    data = data.subspan(taken);
    if (held + taken < kBlock) return;
    mix(rest_.data());
  }
  for (; data.size() >= kBlock; data = data.subspan(kBlock)) mix(data.data());
  std::copy(data.begin(), data.end(), rest_.begin());
}

uint64_t Xxh64::value() const {
  uint64_t hash = seed_ + kPrime5;
  if (bytes_ >= kBlock) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  hash += bytes_;
  const std::byte* p = rest_.data();
  const std::byte* end = p + bytes_ % kBlock;
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
