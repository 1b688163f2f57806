// Where K and V of a position lie. A page holds page_tokens positions of one layer of one sequence:
// K, then V, each [kv_heads, page_tokens, head_dim], so that one head's keys are contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helm/plan.h"

namespace helm::cpu {

// The pages of one pool, by index. Does not own the memory.
struct KvPages {
  std::byte* base = nullptr;
  KvSpec spec;

  std::byte* keys(int32_t page, int64_t head) const { return at(page, head); }
  std::byte* values(int32_t page, int64_t head) const { return at(page, spec.kv_heads + head); }

 private:
  std::byte* at(int32_t page, int64_t slab) const {
    const int64_t slab_bytes = spec.page_tokens * spec.head_dim * dtype_bytes(spec.dtype);
    return base + page * spec.page_bytes() + slab * slab_bytes;
  }
};

}  // namespace helm::cpu
