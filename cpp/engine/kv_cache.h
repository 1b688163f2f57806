// The paged KV cache: a pool of equal pages on each device and the sequences that hold them. A
// layer's pages lie on the device that computes its attention. Knows nothing of what is in a page.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "helm/plan.h"

namespace helm {

// Page numbers of one pool. Pages are reserved before they are taken, so that taking cannot fail.
class PagePool {
 public:
  explicit PagePool(int64_t pages = 0) : pages_(pages) {}

  int64_t pages() const { return pages_; }
  int64_t unreserved() const { return pages_ - reserved_; }
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
  int64_t pages_;
  int64_t reserved_ = 0;
  std::vector<int32_t> free_;  // pages given back, reused before untouched ones
  int32_t untouched_ = 0;      // pages from here on have never been used
};

// One sequence's cache: which page holds which block of which layer.
struct KvSequence {
  int64_t length = 0;          // cached positions
  int64_t capacity = 0;        // reserved positions
  std::vector<int32_t> pages;  // [blocks, layers], each numbered in its layer's pool
};

class KvCache {
 public:
  // on_accelerator: by layer.
  KvCache(const Plan& plan, std::vector<bool> on_accelerator)
      : spec_(plan.kv), layers_(std::move(on_accelerator)) {
    for (const bool there : layers_) ++device_layers_[there];
    pools_ = {PagePool(spec_.pages - plan.accelerator_pages), PagePool(plan.accelerator_pages)};
  }

  int64_t blocks_for(int64_t tokens) const {
    return (tokens + spec_.page_tokens - 1) / spec_.page_tokens;
  }
  // Pages that `tokens` positions take on one device.
  int64_t pages_for(int64_t tokens, bool accelerator) const {
    return blocks_for(tokens) * device_layers_[accelerator];
  }
  int64_t unreserved(bool accelerator) const { return pools_[accelerator].unreserved(); }
  int64_t pages(bool accelerator) const { return pools_[accelerator].pages(); }
  bool can_reserve(int64_t tokens) const {
    return pages_for(tokens, false) <= unreserved(false) &&
           pages_for(tokens, true) <= unreserved(true);
  }

  KvSequence open(int64_t capacity) {
    KvSequence sequence;
    sequence.capacity = capacity;
    sequence.pages.reserve(static_cast<size_t>(blocks_for(capacity) * spec_.layers));
    for (const bool there : {false, true}) pools_[there].reserve(pages_for(capacity, there));
    return sequence;
  }
  void close(KvSequence& sequence) {
    truncate(sequence, 0);
    for (const bool there : {false, true}) {
      pools_[there].unreserve(pages_for(sequence.capacity, there));
    }
  }

  // Takes pages so that the sequence can hold `tokens` positions.
  void extend(KvSequence& sequence, int64_t tokens) {
    const auto entries = static_cast<size_t>(blocks_for(tokens) * spec_.layers);
    while (sequence.pages.size() < entries) {
      sequence.pages.push_back(pool_of_entry(sequence.pages.size()).take());
    }
  }
  void truncate(KvSequence& sequence, int64_t length) {
    sequence.length = length;
    const auto entries = static_cast<size_t>(blocks_for(length) * spec_.layers);
    while (sequence.pages.size() > entries) {
      const int32_t page = sequence.pages.back();
      sequence.pages.pop_back();
      pool_of_entry(sequence.pages.size()).give_back(page);
    }
  }

 private:
  PagePool& pool_of_entry(size_t entry) { return pools_[layers_[entry % layers_.size()]]; }

  KvSpec spec_;
  std::vector<bool> layers_;                // by layer: on the accelerator
  std::array<int64_t, 2> device_layers_{};  // CPU, accelerator
  std::array<PagePool, 2> pools_;           // likewise
};

}  // namespace helm
