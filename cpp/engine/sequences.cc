// Sequences over the KV cache: opened, shared, cut back, kept in files.
#include <algorithm>

#include "base/check.h"
#include "cpu/key_bias.h"
#include "engine/engine_impl.h"
#include "kv/file.h"
#include "weights/digest.h"

namespace helm {

const KvSequence& Engine::Impl::sequence(SequenceId id) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) fail(ErrorKind::kInvalid, "[engine] sequence ", id, " is not open");
  return it->second;
}

std::span<const HeldBlock> Engine::Impl::checked(std::span<const HeldBlock> blocks) const {
  for (const HeldBlock& held : blocks) {
    if (!kv_.in_use(held.block)) {
      fail(ErrorKind::kInvalid, "[engine] nobody holds a KV block ", held.block);
    }
  }
  return blocks;
}

// Pages of an entry with a window that must be there, of those that are given up: held ones, and
// what the open sequences and one more may come to.
int64_t Engine::Impl::windows_to_open(const HeldPrefix& prefix) const {
  if (plan_.kv.window_blocks == 0) return 0;
  const auto sequences = static_cast<int64_t>(sequences_.size()) + 1;
  const int64_t taken = prefix.take ? kv_.windows_of(prefix.blocks) : 0;
  return plan_.kv.most_window_blocks(plan_.limits.step_tokens, sequences) + kv_.held_windows() -
         taken;
}

bool Engine::Impl::can_open(int64_t capacity, int64_t spare, const HeldPrefix& prefix,
                            std::span<const HeldBlock> without) const {
  return std::ssize(sequences_) < plan_.limits.sequences &&
         kv_.blocks_to_open(capacity, prefix) + spare <= kv_.unreserved() + kv_.freed_by(without) &&
         windows_to_open(prefix) <= plan_.kv.window_blocks + kv_.windows_of(without);
}

void Engine::Impl::check_open(int64_t capacity, const HeldPrefix& prefix) const {
  if (capacity < 1 || capacity > plan_.limits.context) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity,
         " positions was asked for, the plan's context is ", plan_.limits.context,
         "; raise the context or shorten the prompt");
  }
  if (static_cast<int64_t>(sequences_.size()) >= plan_.limits.sequences) {
    fail(ErrorKind::kCapacity, "[engine] ", sequences_.size(),
         " sequences are open, the plan's limit; close one or plan for more");
  }
  if (const int64_t blocks = kv_.blocks_to_open(capacity, prefix); blocks > kv_.unreserved()) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity, " positions needs ", blocks,
         " blocks of KV pages, ", kv_.unreserved(), " of ", kv_.blocks(),
         " are free; close a sequence, lower the context or give the KV cache more memory");
  }
  if (const int64_t windows = windows_to_open(prefix); windows > plan_.kv.window_blocks) {
    fail(ErrorKind::kCapacity, "[engine] another sequence needs ", windows,
         " pages of layers with a window beside the ", kv_.held_windows(),
         " that are held, there are ", plan_.kv.window_blocks, "; release what is held");
  }
}

void Engine::Impl::check_continues(SequenceId id, const KvSequence& sequence,
                                   int64_t length) const {
  if (kv_.continues(sequence, length)) return;
  fail(ErrorKind::kInvalid, "[engine] sequence ", id, " cannot be gone on from its first ", length,
       " positions: layers with a window of ", plan_.kv.window(), " hold positions from ",
       sequence.window_begin, " on; compute them anew");
}

SequenceId Engine::Impl::open(int64_t capacity, const HeldPrefix& prefix) {
  if (prefix.length < 0 || prefix.length > capacity ||
      kv_.blocks_for(prefix.length) != std::ssize(prefix.blocks) ||
      usable(prefix.blocks, prefix.length) != prefix.length) {
    fail(ErrorKind::kInvalid, "[engine] cannot begin a sequence of ", capacity,
         " positions with the first ", prefix.length, " of ", prefix.blocks.size(),
         " blocks of KV pages; expected as many blocks as those take, and usable ones");
  }
  check_open(capacity, prefix);
  sequences_.emplace(next_id_, kv_.open(capacity, prefix));
  return next_id_++;
}

SequenceId Engine::Impl::fork(SequenceId source, int64_t length, int64_t capacity) {
  const KvSequence& from = sequence(source);
  if (length < 0 || length > from.length || length > capacity) {
    fail(ErrorKind::kInvalid, "[engine] cannot begin a sequence of ", capacity,
         " positions with the first ", length, " of the ", from.length, " of sequence ", source);
  }
  check_continues(source, from, length);
  std::vector<HeldBlock> shared = kv_.blocks(from, length);
  const bool far = from.far;
  const SequenceId id = open(capacity, {shared, length});
  sequence(id).far = far;
  return id;
}

std::vector<HeldBlock> Engine::Impl::blocks(SequenceId id, int64_t length) const {
  const KvSequence& from = sequence(id);
  if (length < 0 || length > from.length) {
    fail(ErrorKind::kInvalid, "[engine] sequence ", id, " has no ", length, " positions but ",
         from.length);
  }
  return kv_.blocks(from, length);
}

std::vector<HeldBlock> Engine::Impl::detach(SequenceId id, int64_t length) {
  static_cast<void>(blocks(id, length));  // throws
  executor_.finish();
  std::vector<HeldBlock> held = kv_.detach(sequence(id), length);
  sequences_.erase(id);
  return held;
}

void Engine::Impl::release(std::span<const HeldBlock> held) {
  if (kv_.freed_by(checked(held)) > 0) executor_.finish();
  for (const HeldBlock& one : held) kv_.release(one);
}

void Engine::Impl::close(SequenceId id) {
  KvSequence& closed = sequence(id);
  executor_.finish();
  kv_.close(closed);
  sequences_.erase(id);
}

const std::string& Engine::Impl::weights_digest() {
  if (weights_digest_.empty()) {
    std::string digest = helm::weights_digest(plan_, weights_, kernels_, accelerator_.get());
    weights_.check_files(true);
    weights_digest_ = std::move(digest);
  }
  return weights_digest_;
}

std::vector<HeldBlock> Engine::Impl::blocks_to_save(SequenceId id, int64_t tokens) const {
  const KvSequence& saved = sequence(id);
  if (tokens > saved.length) {
    fail(ErrorKind::kInvalid, "[kv] ", tokens, " tokens were given for the ", saved.length,
         " positions of sequence ", id);
  }
  check_continues(id, saved, tokens);
  return kv_.blocks(saved, tokens);
}

void Engine::Impl::save(std::span<const HeldBlock> blocks, std::span<const int32_t> tokens,
                        const std::string& path, const std::string& metadata,
                        const Progress& progress) {
  if (kv_.blocks_for(std::ssize(tokens)) != std::ssize(blocks) ||
      usable(blocks, std::ssize(tokens)) != std::ssize(tokens)) {
    fail(ErrorKind::kInvalid, "[kv] cannot save ", blocks.size(), " blocks of KV pages for ",
         tokens.size(), " tokens; expected as many as those take, and usable ones");
  }
  const KvFileHeader header{plan_.fingerprint,
                            weights_digest(),
                            plan_.kv,
                            {tokens.begin(), tokens.end()},
                            metadata,
                            cpu::lacks_key_biases(plan_),
                            kv_.window_begin(blocks)};
  KvFileWriter writer(path, header);
  std::vector<std::byte> content(static_cast<size_t>(header.block_bytes()));
  for (int64_t b = 0; b < header.blocks(); ++b) {
    const int64_t held =
        std::min(std::ssize(tokens) - b * plan_.kv.page_tokens, plan_.kv.page_tokens);
    std::ranges::fill(content, std::byte{0});  // of positions that were given up
    executor_.read_block(kv_.block(blocks[static_cast<size_t>(b)].block), held, content.data());
    writer.append(content);
    if (progress) progress((b + 1) * header.block_bytes(), header.blocks() * header.block_bytes());
  }
  writer.finish();
}

LoadedSequence Engine::Impl::load(const std::string& path, int64_t capacity,
                                  const Progress& progress) {
  KvFileReader reader(path, plan_, weights_digest());
  const KvFileHeader& header = reader.header();
  const auto length = static_cast<int64_t>(header.tokens.size());
  const SequenceId id = open(std::max(capacity, length), {});
  try {
    KvSequence& loaded = sequence(id);
    std::vector<std::byte> content;
    const int64_t blocks = kv_.blocks_for(length);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = b * plan_.kv.page_tokens;
      const int64_t end = std::min(length, begin + plan_.kv.page_tokens);
      executor_.make_room(1);
      reader.read(content);
      kv_.leave_behind(loaded, begin);
      kv_.extend(loaded, end);
      executor_.write_block(kv_.block(loaded.blocks.back()), end - begin, content.data());
      kv_.grown(loaded, end);
      if (progress) progress((b + 1) * std::ssize(content), blocks * std::ssize(content));
    }
    kv_.leave_behind(loaded, length - 1);  // a prompt of these tokens computes the last one anew
    kv_.give_up(loaded, header.window_begin);
  } catch (...) {
    close(id);
    throw;
  }
  return {id, header.tokens, header.metadata};
}

bool Engine::Impl::grow(SequenceId id, int64_t capacity) {
  KvSequence& grown = sequence(id);
  if (capacity > plan_.limits.context) {
    fail(ErrorKind::kInvalid, "[engine] cannot give sequence ", id, " ", capacity,
         " positions of the context's ", plan_.limits.context);
  }
  if (capacity <= grown.capacity) return true;
  if (kv_.blocks_to_grow(grown, capacity) > kv_.unreserved()) return false;
  kv_.grow(grown, capacity);
  return true;
}

bool Engine::Impl::can_resize(SequenceId id, int64_t length, int64_t capacity) const {
  const KvSequence& resized = sequence(id);
  return length >= 0 && length <= resized.length && capacity >= std::max<int64_t>(length, 1) &&
         capacity <= plan_.limits.context && kv_.continues(resized, length) &&
         kv_.blocks_to_resize(resized, length, capacity) <= kv_.unreserved();
}

void Engine::Impl::resize(SequenceId id, int64_t length, int64_t capacity) {
  KvSequence& kept = sequence(id);
  if (length < 0 || length > kept.length) {
    fail(ErrorKind::kInvalid, "[engine] cannot truncate sequence ", id, " of ", kept.length,
         " positions to ", length);
  }
  if (capacity < std::max<int64_t>(length, 1) || capacity > plan_.limits.context) {
    fail(ErrorKind::kInvalid, "[engine] cannot give sequence ", id, " of ", length, " positions ",
         capacity, " of the context's ", plan_.limits.context);
  }
  check_continues(id, kept, length);
  if (!can_resize(id, length, capacity)) {
    fail(ErrorKind::kCapacity, "[engine] cutting sequence ", id, " back to ", length,
         " positions of ", capacity, " needs ", kv_.blocks_to_resize(kept, length, capacity),
         " more blocks of KV pages, ", kv_.unreserved(), " of ", kv_.blocks(),
         " are free; close a sequence, most of all one that shares its positions");
  }
  executor_.finish();
  kv_.resize(kept, length, capacity);
}

int64_t Engine::Impl::near_wanted(SequenceId id, int64_t tokens) const {
  const KvSequence& target = sequence(id);
  if (!kv_.overflows() || (target.far && tokens == 1)) return 0;
  const bool back = !kv_.shares_last(target) && kv_.last_is_far(target);
  return kv_.blocks_to_extend(target, tokens) + (back ? 1 : 0);
}

int64_t Engine::Impl::far_wanted(SequenceId id, int64_t tokens) const {
  const KvSequence& target = sequence(id);
  return target.far && tokens == 1 ? kv_.blocks_to_extend(target, tokens) : 0;
}

std::vector<int32_t> Engine::Impl::near_ones(std::span<const HeldBlock> held) const {
  std::vector<int32_t> near;
  for (const HeldBlock& one : checked(held)) {
    if (kv_.block(one.block).near != KvBlock::kNone) near.push_back(one.block);
  }
  return near;
}

bool Engine::Impl::can_leave(std::span<const HeldBlock> held) const {
  const std::vector<int32_t> near = near_ones(held);
  return moves() && std::ssize(near) <= kv_.far().free() &&
         std::ranges::all_of(near, [&](int32_t i) { return kv_.block(i).references == 1; });
}

void Engine::Impl::leave(std::span<const HeldBlock> held) {
  const std::vector<int32_t> near = near_ones(held);
  if (!can_leave(held)) {
    fail(ErrorKind::kCapacity, "[engine] ", near.size(), " held blocks of KV pages cannot leave ",
         "the accelerator: others have them, too, or the ", kv_.far().free(),
         " free blocks in host memory are too few; release them");
  }
  if (!near.empty()) executor_.move_blocks(near, true);
}

bool Engine::Impl::can_move(SequenceId id, KvSide side) const {
  const bool far = side == KvSide::kFar;
  const KvCache::Move move = kv_.to_move(sequence(id), far);
  const int64_t slots = far ? kv_.far().free() : kv_.near().free() + executor_.leaving();
  return moves() && move.slots <= slots && move.copies <= kv_.unreserved();
}

int64_t Engine::Impl::move(SequenceId id, KvSide side) {
  KvSequence& moved = sequence(id);
  const bool far = side == KvSide::kFar;
  const char* const there = far ? "host memory" : "the accelerator";
  if (!moves()) {
    fail(ErrorKind::kInvalid, "[engine] sequence ", id, " cannot move to ", there, ": ",
         kv_.overflows() ? "far pages of the plan visit the accelerator (schedule.overflow)"
                         : "the plan has no KV pages in host memory for an accelerator's layers",
         "; plan for KV overflow on the CPU, with fewer pages there");
  }
  const KvCache::Move move = kv_.to_move(moved, far);
  if (!can_move(id, side)) {
    fail(ErrorKind::kCapacity, "[engine] moving sequence ", id, " to ", there, " takes ",
         move.slots, " blocks of KV pages and ", move.copies, " copies of shared ones; ",
         far ? kv_.far().free() : kv_.near().free() + executor_.leaving(), " are free there and ",
         kv_.unreserved(), " of ", kv_.blocks(), " not reserved; close a sequence");
  }
  executor_.free_near(far ? 0 : move.slots);
  moved.far = far;
  std::vector<int32_t> alone;
  for (size_t b = 0; b < moved.blocks.size(); ++b) {
    const KvBlock& block = kv_.block(moved.blocks[b]);
    if ((far ? block.far : block.near) != KvBlock::kNone) continue;
    if (block.references == 1) {
      alone.push_back(moved.blocks[b]);
    } else {
      const auto held = moved.length - static_cast<int64_t>(b) * plan_.kv.page_tokens;
      copy_own(moved, b, std::min(held, plan_.kv.page_tokens));
    }
  }
  if (!alone.empty()) executor_.move_blocks(alone, far);
  if (!far) kv_.came_near(moved, move.slots);
  return move.slots;
}

}  // namespace helm
