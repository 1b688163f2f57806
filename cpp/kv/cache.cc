#include "kv/cache.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace helm {

KvCache::KvCache(const Plan& plan, const std::vector<DeviceIndex>& devices) : spec_(plan.kv) {
  int64_t near_entries = 0;
  for (size_t entry = 0; entry < devices.size(); ++entry) {
    const bool near = devices[entry] != kCpu;
    const bool leaves = spec_.leaves(entry);
    int32_t& units = leaves ? (near ? near_window_units_ : cpu_window_units_)
                            : (near ? near_units_ : cpu_units_);
    near_entry_.push_back(near);
    first_unit_.push_back(units);
    units += static_cast<int32_t>(spec_.page_units(entry));
    near_entries += near;
  }
  blocks_total_ = spec_.blocks;
  window_ = SlotPool(spec_.window_blocks);
  cpu_ = SlotPool(blocks_total_);
  const int64_t pages = std::accumulate(plan.pages.begin() + 1, plan.pages.end(), int64_t{0});
  // Where entries give pages up, none overflows.
  const bool overflows = near_entries > 0 && spec_.window_blocks == 0;
  const int64_t near = overflows ? std::min(pages / near_entries, blocks_total_) : blocks_total_;
  near_ = SlotPool(near_units_ == 0 ? 0 : near);
  far_ = SlotPool(blocks_total_ - near_.slots());
}

KvSequence KvCache::open(int64_t capacity) {
  KvSequence sequence;
  sequence.capacity = capacity;
  sequence.blocks.reserve(static_cast<size_t>(blocks_for(capacity)));
  reserved_ += blocks_for(capacity);
  return sequence;
}

void KvCache::close(KvSequence& sequence) {
  truncate(sequence, 0);
  reserved_ -= blocks_for(sequence.capacity);
}

std::vector<HeldBlock> KvCache::blocks(const KvSequence& sequence, int64_t length) const {
  std::vector<HeldBlock> blocks;
  for (int64_t b = 0; b < blocks_for(length); ++b) {
    const bool gone = sequence.window_begin >= (b + 1) * spec_.page_tokens;
    blocks.push_back(
        {sequence.blocks[static_cast<size_t>(b)], gone ? HeldBlock::kGone : sequence.window_begin});
  }
  return blocks;
}

std::vector<HeldBlock> KvCache::detach(KvSequence& sequence, int64_t length) {
  leave_behind(sequence, std::max<int64_t>(0, length - 1));  // where a prompt of them goes on
  std::vector<HeldBlock> held = blocks(sequence, length);
  held_windows_ += windows_of(held);
  if (overflows() && !held.empty()) line_up(held.back().block);
  const auto first = static_cast<size_t>(sequence.window_begin / spec_.page_tokens);
  for (size_t b = held.size(); b < sequence.blocks.size(); ++b) {
    if (b >= first) drop_window(sequence.blocks[b]);
    drop(sequence.blocks[b]);
  }
  reserved_ -= blocks_for(sequence.capacity) - std::ssize(sequence.blocks);
  sequence = {};
  return held;
}

void KvCache::drop_window_of(HeldBlock& held) {
  if (!has_window(held)) return;
  drop_window(held.block);
  held.window_begin = HeldBlock::kGone;
  --held_windows_;
}

void KvCache::release(const HeldBlock& held) {
  HeldBlock released = held;
  drop_window_of(released);
  drop(released.block);
}

int64_t KvCache::freed_by(std::span<const HeldBlock> held) const {
  return std::ranges::count_if(held, [&](const HeldBlock& one) {
    const KvBlock& block = this->block(one.block);
    return block.references == 1 || block.credits > std::max(0, block.references - 2);
  });
}

int64_t KvCache::blocks_to_open(int64_t capacity, const HeldPrefix& prefix) const {
  int64_t count = blocks_for(capacity) - blocks_for(prefix.length);
  if (prefix.length % spec_.page_tokens != 0) {
    const auto last = static_cast<size_t>(blocks_for(prefix.length) - 1);
    const KvBlock& block = this->block(prefix.blocks[last].block);
    count += lacks_credit(block, block.references + (prefix.take ? 0 : 1));
  }
  return count;
}

KvSequence KvCache::open(int64_t capacity, const HeldPrefix& prefix) {
  KvSequence sequence = open(capacity);
  if (prefix.length == 0) return sequence;
  const auto blocks = prefix.blocks.first(static_cast<size_t>(blocks_for(prefix.length)));
  sequence.length = prefix.length;
  sequence.window_begin = window_begin(blocks);
  for (const HeldBlock& held : blocks) {
    ++blocks_[static_cast<size_t>(held.block)].references;
    sequence.blocks.push_back(held.block);
    --reserved_;
  }
  if (spec_.window_blocks > 0) {
    const int64_t first = window_begin(prefix.length) / spec_.page_tokens;
    sequence.window_begin = std::max(sequence.window_begin, first * spec_.page_tokens);
    for (int64_t b = first; b < std::ssize(blocks); ++b) {
      ++blocks_[static_cast<size_t>(sequence.blocks[static_cast<size_t>(b)])].windows;
    }
  }
  const bool part = prefix.length % spec_.page_tokens != 0;
  if (prefix.take) {
    for (HeldBlock& held : blocks) drop_window_of(held);
    if (part) drop(std::exchange(blocks.back().block, -1));
  }
  if (part) reserve_copy(sequence.blocks.back());
  return sequence;
}

int64_t KvCache::window_begin(std::span<const HeldBlock> blocks) const {
  int64_t begin = 0;
  for (int64_t b = 0; b < std::ssize(blocks); ++b) {
    const int64_t lacks = blocks[static_cast<size_t>(b)].window_begin;
    if (lacks > b * spec_.page_tokens) begin = std::min(lacks, (b + 1) * spec_.page_tokens);
  }
  return begin;
}

// Whether, where one block stands behind another, the one before has left the accelerator, or will
// before the other does.
bool KvCache::leave_in_order(int32_t before, int32_t after) const {
  const KvBlock& a = block(before);
  const KvBlock& b = block(after);
  if (a.far != KvBlock::kNone) return true;
  if (b.far != KvBlock::kNone) return false;
  return b.full_since == 0 || (a.full_since != 0 && a.full_since < b.full_since);
}

// Whether all is there that windows of the next position show.
bool KvCache::shows(std::span<const HeldBlock> blocks, int64_t length) const {
  if (spec_.window() == 0) return true;
  const int64_t begin = window_begin(length);
  for (int64_t b = begin / spec_.page_tokens; b < blocks_for(length); ++b) {
    const int64_t first = std::max(begin, b * spec_.page_tokens);
    if (blocks[static_cast<size_t>(b)].window_begin > first) return false;
  }
  return true;
}

int64_t KvCache::usable(std::span<const HeldBlock> blocks, int64_t length) const {
  if (overflows()) {
    for (int64_t b = 1; b < blocks_for(length); ++b) {
      const auto i = static_cast<size_t>(b);
      if (!leave_in_order(blocks[i - 1].block, blocks[i].block)) length = b * spec_.page_tokens;
    }
  }
  while (length > 0 && !shows(blocks, length)) {
    length = (blocks_for(length) - 1) * spec_.page_tokens;
  }
  return length;
}

void KvCache::give_up(KvSequence& sequence, int64_t position) {
  if (position <= sequence.window_begin) return;
  const int64_t first = position / spec_.page_tokens;
  for (int64_t b = sequence.window_begin / spec_.page_tokens; b < first; ++b) {
    drop_window(sequence.blocks[static_cast<size_t>(b)]);
  }
  sequence.window_begin = position;
}

// One sequence less whose window may show the block.
void KvCache::drop_window(int32_t index) {
  KvBlock& block = blocks_[static_cast<size_t>(index)];
  if (block.window == KvBlock::kNone || --block.windows > 0) return;
  window_.give_back(std::exchange(block.window, KvBlock::kNone));
}

// A sequence will write to a block that others may still hold then.
void KvCache::reserve_copy(int32_t index) {
  KvBlock& shared = blocks_[static_cast<size_t>(index)];
  if (!lacks_credit(shared, shared.references)) return;
  ++shared.credits;
  ++reserved_;
}

int32_t KvCache::own(KvSequence& sequence, size_t b) {
  const int32_t shared = sequence.blocks[b];
  if (b + 1 == sequence.blocks.size() && sequence.length % spec_.page_tokens != 0) {
    --blocks_[static_cast<size_t>(shared)].credits;  // there is one: references > 1
    --reserved_;
  }
  drop_window(shared);
  drop(shared);
  sequence.blocks[b] = take_block(sequence.far);
  return shared;
}

int64_t KvCache::blocks_to_truncate(const KvSequence& sequence, int64_t length) const {
  int64_t count = 0;
  const auto kept = static_cast<size_t>(blocks_for(length));
  for (size_t b = kept; b < sequence.blocks.size(); ++b) {
    count += block(sequence.blocks[b]).references > 1;
  }
  if (length % spec_.page_tokens != 0) {
    const KvBlock& last = block(sequence.blocks[kept - 1]);
    count += lacks_credit(last, last.references);
  }
  return count;
}

void KvCache::extend(KvSequence& sequence, int64_t tokens) {
  while (static_cast<int64_t>(sequence.blocks.size()) < blocks_for(tokens)) {
    sequence.blocks.push_back(take_block(sequence.far));
    --reserved_;
  }
}

void KvCache::truncate(KvSequence& sequence, int64_t length) {
  sequence.length = length;
  while (static_cast<int64_t>(sequence.blocks.size()) > blocks_for(length)) {
    if (std::ssize(sequence.blocks) > sequence.window_begin / spec_.page_tokens) {
      drop_window(sequence.blocks.back());
    }
    drop(sequence.blocks.back());
    sequence.blocks.pop_back();
    ++reserved_;
  }
  if (length == 0) sequence.window_begin = 0;
  if (length % spec_.page_tokens == 0) return;
  reserve_copy(sequence.blocks.back());
}

void KvCache::resize(KvSequence& sequence, int64_t length, int64_t capacity) {
  truncate(sequence, length);
  reserved_ += blocks_for(capacity) - blocks_for(sequence.capacity);
  sequence.capacity = capacity;
}

KvCache::Full KvCache::in_line(int32_t index, int64_t since) {
  const auto stale = [&](const Full& full) {
    const KvBlock& block = this->block(full.block);
    return block.full_since != full.since || block.near == KvBlock::kNone;
  };
  if (std::ssize(full_) > 4 * blocks_total_) std::erase_if(full_, stale);
  blocks_[static_cast<size_t>(index)].full_since = since;
  return {index, since};
}

// The block may be evicted from now on.
void KvCache::line_up(int32_t index) {
  if (block(index).full_since == 0) full_.push_back(in_line(index, ++lined_up_));
}

// Blocks of a sequence leave in their order, so that those that are far are always the first ones:
// these before any others, which may stand behind them.
void KvCache::came_near(const KvSequence& sequence, int64_t count) {
  const bool grows = sequence.length < sequence.capacity && count == std::ssize(sequence.blocks);
  for (int64_t b = count - (grows ? 1 : 0); b-- > 0;) {
    full_.push_front(in_line(sequence.blocks[static_cast<size_t>(b)], --put_in_front_));
  }
}

KvCache::Move KvCache::to_move(const KvSequence& sequence, bool far) const {
  Move move;
  for (size_t b = 0; b < sequence.blocks.size(); ++b) {
    const KvBlock& one = block(sequence.blocks[b]);
    if ((far ? one.far : one.near) != KvBlock::kNone) continue;
    ++move.slots;
    const bool last = b + 1 == sequence.blocks.size();  // a copy of that is reserved
    move.copies += one.references > 1 && !(last && shares_last(sequence));
  }
  return move;
}

void KvCache::keep_last_near(const KvSequence& sequence) {
  if (sequence.length % spec_.page_tokens == 0) return;
  blocks_[static_cast<size_t>(sequence.blocks.back())].full_since = 0;
}

void KvCache::grown(KvSequence& sequence, int64_t length) {
  const auto followed = [&](int64_t positions) {
    return positions == 0 ? 0 : (positions - 1) / spec_.page_tokens;
  };
  if (overflows()) {
    for (int64_t b = followed(sequence.length); b < followed(length); ++b) {
      line_up(sequence.blocks[static_cast<size_t>(b)]);
    }
  }
  sequence.length = length;
}

int64_t KvCache::far_blocks(const KvSequence& sequence) const {
  int64_t count = 0;
  while (count < static_cast<int64_t>(sequence.blocks.size()) &&
         block(sequence.blocks[static_cast<size_t>(count)]).far != KvBlock::kNone) {
    ++count;
  }
  return count;
}

void KvCache::append_pages(const KvBlock& b, bool far, std::vector<int32_t>& table) const {
  for (size_t entry = 0; entry < first_unit_.size(); ++entry) {
    const bool near = near_entry_[entry];
    const bool leaves = spec_.leaves(entry);
    const int32_t slot = leaves ? b.window : far ? b.far : near ? b.near : b.cpu;
    int32_t units = near ? near_units_ : cpu_units_;
    int32_t first = first_unit_[entry];
    if (leaves) {
      first += static_cast<int32_t>(near ? near_.slots() : cpu_.slots()) * units;
      units = near ? near_window_units_ : cpu_window_units_;
    }
    table.push_back(slot == KvBlock::kNone ? KvBlock::kNone : slot * units + first);
  }
}

std::optional<int32_t> KvCache::oldest_near() {
  while (!full_.empty()) {
    const Full oldest = full_.front();
    const KvBlock& block = this->block(oldest.block);
    if (block.full_since == oldest.since && block.near != KvBlock::kNone) return oldest.block;
    full_.pop_front();
  }
  return std::nullopt;
}

int32_t KvCache::evict(int32_t index) {
  KvBlock& block = blocks_[static_cast<size_t>(index)];
  const int32_t slot = block.near;
  block.near = KvBlock::kNone;
  block.far = far_.take();
  return slot;
}

int32_t KvCache::recall(int32_t index) {
  KvBlock& block = blocks_[static_cast<size_t>(index)];
  const int32_t slot = block.far;
  block.far = KvBlock::kNone;
  block.near = near_.take();
  block.full_since = 0;
  return slot;
}

int32_t KvCache::exchange(int32_t index) {
  const int32_t leaving = *oldest_near();
  KvBlock& back = blocks_[static_cast<size_t>(index)];
  KvBlock& away = blocks_[static_cast<size_t>(leaving)];
  std::swap(back.near, away.near);
  std::swap(back.far, away.far);
  back.full_since = 0;
  return back.near;
}

int32_t KvCache::take_block(bool far) {
  int32_t index = static_cast<int32_t>(blocks_.size());
  if (free_blocks_.empty()) {
    blocks_.emplace_back();
  } else {
    index = free_blocks_.back();
    free_blocks_.pop_back();
  }
  KvBlock& block = blocks_[static_cast<size_t>(index)];
  block = {};
  block.references = 1;
  if (cpu_units_ > 0) block.cpu = cpu_.take();
  if (near_units_ > 0) (far ? block.far : block.near) = (far ? far_ : near_).take();
  if (window_.slots() > 0) {
    block.window = window_.take();
    block.windows = 1;
  }
  ++blocks_used_;
  return index;
}

void KvCache::drop(int32_t index) {
  KvBlock& block = blocks_[static_cast<size_t>(index)];
  --block.references;
  if (block.credits > std::max(0, block.references - 1)) {
    --block.credits;
    --reserved_;
  }
  if (block.references > 0) return;
  if (block.cpu != KvBlock::kNone) cpu_.give_back(block.cpu);
  if (block.near != KvBlock::kNone) near_.give_back(block.near);
  if (block.far != KvBlock::kNone) far_.give_back(block.far);
  if (block.window != KvBlock::kNone) window_.give_back(block.window);
  block.full_since = 0;
  free_blocks_.push_back(index);
  --blocks_used_;
}

}  // namespace helm
