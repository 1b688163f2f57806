// The paged KV cache: blocks of positions, the slots of memory that hold them, and the sequences
// that they belong to. A slot holds the pages of one block, of every KV entry on its device, side
// by side. Where entries with a window give pages up, those have slots of their own, behind the
// others: a block has one until all of its sequences have gone on so far that no window shows it.
// Blocks may be held without a sequence, too, see HeldBlock. Knows nothing of what is in a page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "helm/held_block.h"
#include "helm/plan.h"

namespace helm {

class SlotPool {
 public:
  explicit SlotPool(int64_t slots = 0) : slots_(slots) {}

  int64_t slots() const { return slots_; }
  int64_t used() const { return used_; }
  int64_t free() const { return slots_ - used_; }

  int32_t take() {
    ++used_;
    if (free_.empty()) return untouched_++;
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give_back(int32_t slot) {
    --used_;
    free_.push_back(slot);
  }

 private:
  int64_t slots_;
  int64_t used_ = 0;
  std::vector<int32_t> free_;  // given back, reused before untouched ones
  int32_t untouched_ = 0;      // slots from here on have never been used
};

// Positions of a sequence, or of several that share them.
struct KvBlock {
  static constexpr int32_t kNone = -1;
  int32_t cpu = kNone;     // slot for layers on the CPU
  int32_t near = kNone;    // slot on the accelerator for layers there, or
  int32_t far = kNone;     // in host memory, once evicted
  int32_t window = kNone;  // slot of entries that give pages up, on every device
  int32_t windows = 0;     // of those that hold it, whose window may show it
  int32_t references = 0;  // sequences, and others that hold it
  int32_t credits = 0;     // blocks reserved for those that will write here and need a copy first
  int64_t full_since = 0;  // its place in the line of those that leave next, 0: in none
};

struct KvSequence {
  int64_t length = 0;           // cached positions
  int64_t capacity = 0;         // reserved positions
  int64_t window_begin = 0;     // entries with a window lack what lies before
  bool far = false;             // all of its blocks are far, and those that it takes
  std::vector<int32_t> blocks;  // block b holds positions b * page_tokens and on
};

class KvCache {
 public:
  // devices: by KV entry.
  KvCache(const Plan& plan, const std::vector<DeviceIndex>& devices);

  int64_t blocks_for(int64_t tokens) const {
    return (tokens + spec_.page_tokens - 1) / spec_.page_tokens;
  }
  int64_t blocks() const { return blocks_total_; }
  int64_t unreserved() const { return blocks_total_ - blocks_used_ - reserved_; }
  // Whether there are fewer slots on the accelerator than blocks.
  bool overflows() const { return near_units_ > 0 && near_.slots() < blocks_total_; }
  int64_t cpu_bytes() const {
    return (blocks_total_ * cpu_units_ + window_.slots() * cpu_window_units_) * spec_.unit_bytes();
  }
  int64_t near_bytes() const {
    return near_.slots() * slot_bytes() + window_.slots() * near_window_units_ * spec_.unit_bytes();
  }
  int64_t far_bytes() const { return overflows() ? far_.slots() * slot_bytes() : 0; }
  int64_t slot_bytes() const { return near_units_ * spec_.unit_bytes(); }  // of near and far
  // Where an entry's page begins in a slot of its device.
  int64_t slot_offset(size_t entry) const { return first_unit_[entry] * spec_.unit_bytes(); }

  // A sequence for which `capacity` positions are reserved, so that extending it cannot fail. Needs
  // blocks_for(capacity) <= unreserved().
  KvSequence open(int64_t capacity);
  void close(KvSequence& sequence);
  // The blocks of the sequence's first `length` positions, which the caller does not hold.
  std::vector<HeldBlock> blocks(const KvSequence& sequence, int64_t length) const;
  // Closes the sequence. The caller holds those blocks from now on; they may be evicted, all of
  // them.
  std::vector<HeldBlock> detach(KvSequence& sequence, int64_t length);
  void release(const HeldBlock& held);
  // Blocks that are free once these, of which none occurs twice, are released.
  int64_t freed_by(std::span<const HeldBlock> held) const;
  // A sequence that begins with the positions of a prefix: it shares their blocks. The last one, if
  // it is not full, is to be copied by own() before it is written to. Needs blocks_to_open()
  // <= unreserved(), slots for windows and usable() blocks.
  KvSequence open(int64_t capacity, const HeldPrefix& prefix);
  int64_t blocks_to_open(int64_t capacity, const HeldPrefix& prefix) const;
  // See Engine::usable().
  int64_t usable(std::span<const HeldBlock> blocks, int64_t length) const;
  // Entries with a window lack something before this position, and nothing behind.
  int64_t window_begin(std::span<const HeldBlock> blocks) const;
  // Slots of entries that give pages up, of held blocks.
  int64_t held_windows() const { return held_windows_; }
  int64_t windows_of(std::span<const HeldBlock> held) const {
    return std::ranges::count_if(held, [&](const HeldBlock& one) { return has_window(one); });
  }
  // Whether a sequence of its first `length` positions could go on: all that the windows of the
  // next position show is there.
  bool continues(const KvSequence& sequence, int64_t length) const {
    return sequence.window_begin == 0 || length == 0 ||
           window_begin(length) >= sequence.window_begin;
  }
  // Gives up what no window of a next position `length` shows: the sequence cannot be cut back to
  // less than that, but to nothing.
  void leave_behind(KvSequence& sequence, int64_t length) {
    if (spec_.window_blocks > 0) {
      give_up(sequence, window_begin(length) / spec_.page_tokens * spec_.page_tokens);
    }
  }
  // Entries with a window are to lack what lies before a position.
  void give_up(KvSequence& sequence, int64_t position);
  // Whether the sequence's next position falls in a block that others share.
  bool shares_last(const KvSequence& sequence) const {
    return sequence.length % spec_.page_tokens != 0 && block(sequence.blocks.back()).references > 1;
  }
  // Whether it falls in a block that was evicted.
  bool last_is_far(const KvSequence& sequence) const {
    return sequence.length % spec_.page_tokens != 0 &&
           block(sequence.blocks.back()).far != KvBlock::kNone;
  }
  // Gives the sequence a block of its own in place of a shared one, which is returned: its content
  // is to be copied. Needs a free slot on the sequence's side, and, but for the last one if that is
  // not full, an unreserved block.
  int32_t own(KvSequence& sequence, size_t b);
  // Blocks that the sequence takes when it is to hold `tokens` positions more: new ones, and a copy
  // of the last one if that is shared.
  int64_t blocks_to_extend(const KvSequence& sequence, int64_t tokens) const {
    return blocks_for(sequence.length + tokens) - std::ssize(sequence.blocks) +
           (shares_last(sequence) ? 1 : 0);
  }
  // Takes blocks so that the sequence can hold `tokens` positions. Needs as many free slots on its
  // side.
  void extend(KvSequence& sequence, int64_t tokens);
  // Needs blocks_to_truncate() <= unreserved(): those that others hold do not become free.
  void truncate(KvSequence& sequence, int64_t length);
  int64_t blocks_to_truncate(const KvSequence& sequence, int64_t length) const;
  // Truncates, and reserves for another capacity from now on. Needs blocks_to_resize() <=
  // unreserved().
  void resize(KvSequence& sequence, int64_t length, int64_t capacity);
  int64_t blocks_to_resize(const KvSequence& sequence, int64_t length, int64_t capacity) const {
    return blocks_to_truncate(sequence, length) + blocks_for(capacity) -
           blocks_for(sequence.capacity);
  }
  // Reserves for `capacity` positions, no fewer than now. Needs blocks_to_grow() <= unreserved().
  void grow(KvSequence& sequence, int64_t capacity) {
    reserved_ += blocks_to_grow(sequence, capacity);
    sequence.capacity = capacity;
  }
  int64_t blocks_to_grow(const KvSequence& sequence, int64_t capacity) const {
    return blocks_for(capacity) - blocks_for(sequence.capacity);
  }
  // The sequence is about to write to its last block, which is its own: it is not to be evicted
  // until another follows it.
  void keep_last_near(const KvSequence& sequence);
  // The sequence has grown to `length`. Blocks that are followed by another may be evicted from now
  // on: only the last one changes.
  void grown(KvSequence& sequence, int64_t length);

  // Blocks of the sequence, from the first, that are in host memory.
  int64_t far_blocks(const KvSequence& sequence) const;
  int64_t near_blocks(const KvSequence& sequence) const {
    return near_units_ == 0 ? 0 : std::ssize(sequence.blocks) - far_blocks(sequence);
  }
  // What it takes to have all of a sequence far, or near: slots there, and blocks for copies of
  // those that others share.
  struct Move {
    int64_t slots = 0;
    int64_t copies = 0;
  };
  Move to_move(const KvSequence& sequence, bool far) const;
  // The first blocks of the sequence, its own, have come to the accelerator, where the others are.
  void came_near(const KvSequence& sequence, int64_t count);
  const KvBlock& block(int32_t index) const { return blocks_[static_cast<size_t>(index)]; }
  bool in_use(int32_t index) const {
    return index >= 0 && index < std::ssize(blocks_) && block(index).references > 0;
  }
  // The first unit of each entry's page, see KvSpec; with `far` those in host memory of a block
  // that was evicted, which has none on the accelerator.
  void append_pages(const KvBlock& block, bool far, std::vector<int32_t>& table) const;
  bool near_entry(size_t entry) const { return near_entry_[entry]; }

  // Evicting: the block that has been full for longest and still lies near, if there is any.
  std::optional<int32_t> oldest_near();
  // Gives it a slot in host memory and returns the slot it leaves, to be given back with
  // release_near() when its content has been copied.
  int32_t evict(int32_t index);
  // The opposite: gives it a slot on the accelerator and returns the one it leaves in host memory,
  // to be given back with release_far().
  int32_t recall(int32_t index);
  // Where neither has a free slot: the block, which was evicted, and oldest_near(), which there
  // must be, change places. Returns the slot on the accelerator; the contents are to be exchanged.
  int32_t exchange(int32_t index);
  void release_far(int32_t slot) { far_.give_back(slot); }
  void release_near(int32_t slot) { near_.give_back(slot); }
  const SlotPool& near() const { return near_; }
  const SlotPool& far() const { return far_; }
  const SlotPool& windows() const { return window_; }  // of entries that give pages up

 private:
  int32_t take_block(bool far);
  void drop(int32_t index);
  void drop_window(int32_t index);
  int64_t window_begin(int64_t length) const {
    return std::max<int64_t>(0, length - spec_.window() + 1);
  }
  bool has_window(const HeldBlock& held) const {
    return spec_.window_blocks > 0 && held.window_begin != HeldBlock::kGone;
  }
  // Whether one that writes to a block that others may hold needs a block reserved for its copy.
  bool lacks_credit(const KvBlock& block, int32_t references) const {
    return block.credits < references - 1;
  }
  bool leave_in_order(int32_t before, int32_t after) const;
  bool shows(std::span<const HeldBlock> blocks, int64_t length) const;
  void drop_window_of(HeldBlock& held);
  void line_up(int32_t index);
  void reserve_copy(int32_t index);

  KvSpec spec_;
  std::vector<int32_t> first_unit_;  // by entry: of its page in a slot of its device
  std::vector<bool> near_entry_;     // by entry: on the accelerator
  int32_t cpu_units_ = 0;            // of a slot
  int32_t near_units_ = 0;           // likewise
  int32_t cpu_window_units_ = 0;     // of a slot of entries that give pages up
  int32_t near_window_units_ = 0;    // likewise
  int64_t blocks_total_ = 0;
  int64_t blocks_used_ = 0;
  int64_t reserved_ = 0;  // blocks that open sequences may still take
  int64_t held_windows_ = 0;
  SlotPool cpu_, near_, far_, window_;
  std::vector<KvBlock> blocks_;
  std::vector<int32_t> free_blocks_;
  // Blocks in the order in which they became full; those that have another place by now, or none,
  // and those that were evicted are skipped.
  struct Full {
    int32_t block;
    int64_t since;
  };
  // The block's place from now on.
  Full in_line(int32_t index, int64_t since);
  std::deque<Full> full_;
  int64_t lined_up_ = 0;      // so far
  int64_t put_in_front_ = 0;  // likewise, counted down
};

}  // namespace helm
