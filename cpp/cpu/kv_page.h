// Where K and V of a position lie. A page holds page_tokens positions of one layer of one sequence:
// K, then V, each a slab per KV head: [page_tokens, head_dim], so that one head's keys are
// contiguous, and after them, where the dtype has scales, [page_tokens] f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernels/kernels.h"
#include "helm/plan.h"

namespace helm::cpu {

// The pages of one pool, by index. Does not own the memory.
struct KvPages {
  std::byte* base = nullptr;
  KvSpec spec;

  std::byte* keys(int32_t page, int64_t head) const { return slab(page, head); }
  std::byte* values(int32_t page, int64_t head) const { return slab(page, spec.kv_heads + head); }
  float* key_scales(int32_t page, int64_t head) const { return scales(keys(page, head)); }
  float* value_scales(int32_t page, int64_t head) const { return scales(values(page, head)); }

  // The first `count` positions.
  KvSpan span(int32_t page, int64_t head, int64_t count) const {
    return {keys(page, head), values(page, head), key_scales(page, head), value_scales(page, head),
            count};
  }

 private:
  std::byte* slab(int32_t page, int64_t index) const {
    return base + page * spec.page_bytes() + index * spec.slab_bytes();
  }
  float* scales(std::byte* slab) const {
    return kv_scale_bytes(spec.dtype) > 0 ? reinterpret_cast<float*>(slab + spec.rows_bytes())
                                          : nullptr;
  }
};

// The first `positions` of a page to another. What else both hold stays as it is.
inline void copy_positions(const KvSpec& spec, int64_t positions, const std::byte* from,
                           std::byte* to) {
  if (positions == spec.page_tokens) {
    std::memcpy(to, from, static_cast<size_t>(spec.page_bytes()));
    return;
  }
  const auto rows = static_cast<size_t>(positions * spec.row_bytes());
  const auto scales = static_cast<size_t>(positions * kv_scale_bytes(spec.dtype));
  for (int64_t slab = 0; slab < 2 * spec.kv_heads; ++slab) {
    std::memcpy(to, from, rows);
    std::memcpy(to + spec.rows_bytes(), from + spec.rows_bytes(), scales);
    from += spec.slab_bytes();
    to += spec.slab_bytes();
  }
}

}  // namespace helm::cpu
