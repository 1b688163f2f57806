// How much room a request is promised when it begins, and what is left for those that run. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace helm {

// Tokens that a request that begins may add before it asks for room again.
struct RoomPolicy {
  int64_t promised_tokens = 64;
};

// Positions, up to the end of a block, of one that wants to hold so many and may come to `most`.
inline int64_t whole_blocks(int64_t positions, int64_t most, int64_t page_tokens) {
  return std::min(most, (positions + page_tokens - 1) / page_tokens * page_tokens);
}

// Of one that begins, or begins again, with so many tokens.
inline int64_t promised(const RoomPolicy& policy, int64_t tokens, int64_t most,
                        int64_t page_tokens) {
  return whole_blocks(std::min(most, tokens + policy.promised_tokens - 1), most, page_tokens);
}

// Blocks that stay free for one that runs when another begins: its next, if it needs one more.
inline int64_t next_blocks(int64_t capacity, int64_t most) {
  return capacity < most ? 1 : 0;
}

}  // namespace helm
