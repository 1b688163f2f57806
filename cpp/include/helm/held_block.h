// Blocks of KV pages that are held without a sequence, so that others can begin with them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace helm {

// One that somebody holds, until Engine::release().
struct HeldBlock {
  static constexpr int64_t kGone = std::numeric_limits<int64_t>::max();
  int32_t block = -1;
  // Layers with a window lack what lies before this position of the sequence that it was part of;
  // kGone: they lack all of the block.
  int64_t window_begin = 0;

  bool operator==(const HeldBlock&) const = default;
};

// What a sequence is to begin with.
struct HeldPrefix {
  std::span<HeldBlock> blocks;  // of the first positions, in order
  int64_t length = 0;           // positions of those
  // The last block, if `length` ends within it, goes over to the sequence, which then need not copy
  // it: its `block` is -1 from then on. So do windows: each `window_begin` is kGone.
  bool take = false;
};

}  // namespace helm
