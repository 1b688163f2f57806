// KV pages of a device's layers that do not fit there: the oldest full blocks are copied to
// page-locked host memory beside the computing, and come back when they are to be written to.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "device/memory.h"
#include "helm/plan.h"
#include "kv/cache.h"

namespace helm {

class Paging {
 public:
  // near: the device's pool; copies: for copies of pages and of what is needed of them.
  // Everything must outlive the paging.
  Paging(const Plan& plan, KvCache& kv, DeviceAddress near, Stream& copies, Account& host,
         Account& account);

  // In host memory: the pages of a block there, side by side.
  std::byte* far_slot(int32_t slot) const { return far_.data() + slot * slot_bytes_; }
  int64_t far_bytes() const { return far_.bytes(); }
  int64_t evicted_blocks() const { return evicted_blocks_; }
  // Blocks that may come to the device before others have to leave.
  int64_t near_room() const { return near_most() - kv_.near().used() + leaving(); }
  int64_t near_most() const { return evict_above_; }        // while it has none
  int64_t leaving() const { return std::ssize(leaving_); }  // whose slots come free

  // Before a step that takes `blocks` new ones: makes room for them, and evicts what lies past the
  // watermark; `far_blocks` slots in host memory stay free. All work that reads or writes pages
  // must have been enqueued on `stream`.
  void make_room(int64_t blocks, int64_t far_blocks, Stream& stream);
  // Slots whose content has left come free, until there are so many.
  void reclaim(int64_t slots);
  // Likewise: brings a block back that is about to be written to. Where both memories are full, it
  // and the block that has been full for longest change places.
  void recall(int32_t block, int64_t far_blocks, Stream& stream);
  // Likewise: blocks leave, or come back; there are slots for them.
  void leave(std::span<const int32_t> blocks, Stream& stream);
  void come(std::span<const int32_t> blocks, Stream& stream);

 private:
  struct Leaving {
    int32_t slot;
    std::unique_ptr<Event> copied;
  };

  void follow(Stream& stream);
  void evict(int32_t block);
  void exchange(int32_t block, Stream& stream);

  KvCache& kv_;
  Device& device_;
  Stream& copies_;
  DeviceAddress near_;
  int64_t slot_bytes_;
  int64_t evict_above_;  // slots in use
  StagingMemory far_;    // [slots, slot_bytes]
  int64_t evicted_blocks_ = 0;
  std::deque<Leaving> leaving_;  // slots whose content is being copied, oldest first
  std::vector<std::unique_ptr<Event>> spare_;
  std::unique_ptr<Event> written_;  // by the stream
  std::unique_ptr<Event> recalled_;
};

}  // namespace helm
