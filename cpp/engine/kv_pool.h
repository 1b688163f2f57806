// The paged KV cache of one memory tier: a pool of equal pages and the sequences that hold them.
// Knows nothing of attention or of what is in a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "helm/plan.h"

namespace helm {

class KvPool {
 public:
  explicit KvPool(const KvSpec& spec)
      : spec_(spec), arena_(spec.pages * spec.page_bytes(), "the KV cache") {}

  std::byte* base() const { return arena_.data(); }
  int64_t bytes() const { return arena_.bytes(); }

  // Pages that `tokens` positions take over all layers.
  int64_t pages_for(int64_t tokens) const {
    return (tokens + spec_.page_tokens - 1) / spec_.page_tokens * spec_.layers;
  }

  // Pages are reserved before they are taken, so that taking one cannot fail.
  int64_t unreserved() const { return spec_.pages - reserved_; }
  void reserve(int64_t pages) { reserved_ += pages; }
  void unreserve(int64_t pages) { reserved_ -= pages; }

  int32_t take() {
    if (free_.empty()) return untouched_++;
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_back(int32_t page) { free_.push_back(page); }

 private:
  KvSpec spec_;
  Arena arena_;
  int64_t reserved_ = 0;
  std::vector<int32_t> free_;  // pages given back, reused before untouched ones
  int32_t untouched_ = 0;      // pages from here on have never been used
};

// One sequence's cache: which page holds which block of which layer.
struct KvSequence {
  int64_t length = 0;          // cached positions
  int64_t capacity = 0;        // reserved positions
  std::vector<int32_t> pages;  // [blocks, layers]
};

}  // namespace helm
