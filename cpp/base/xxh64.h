// XXH64 (Collet 2012), a checksum at the rate of memory: finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace helm {

uint64_t xxh64(std::span<const std::byte> data, uint64_t seed);

}  // namespace helm
