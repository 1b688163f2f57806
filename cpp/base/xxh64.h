// XXH64 (Collet 2012), a checksum at the rate of memory: finds damage, not forgery.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace helm {

// The checksum of what was added, in pieces of any size.
class Xxh64 {
 public:
  explicit Xxh64(uint64_t seed);
  void add(std::span<const std::byte> data);
  uint64_t value() const;

 private:
  static constexpr size_t kBlock = 32;

  void mix(const std::byte* block);

  uint64_t seed_;
  std::array<uint64_t, 4> lanes_;
  std::array<std::byte, kBlock> rest_{};  // added and not yet mixed: bytes_ % kBlock
  uint64_t bytes_ = 0;
};

inline uint64_t xxh64(std::span<const std::byte> data, uint64_t seed) {
  Xxh64 hash(seed);
  hash.add(data);
  return hash.value();
}

}  // namespace helm
