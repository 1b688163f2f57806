#include "helm/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "serve/prefix_tree.h"

namespace helm {

int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const auto least = static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  return std::mismatch(a.begin(), a.begin() + least, b.begin()).first - a.begin();
}

// What a prompt shares with what is kept, or with a sequence in use: then the path is empty.
struct PrefixCache::Match {
  PrefixTree::Path path;
  std::vector<HeldBlock> blocks;
  int64_t shared = 0;
  bool take = false;  // nothing else begins with these blocks, and they hold nothing else

  bool kept() const { return !path.nodes.empty(); }
  HeldPrefix prefix() { return {blocks, shared, take}; }
  // No more than `most` positions, and what can be gone on from.
  void cut(const Engine& engine, int64_t most) {
    const int64_t page_tokens = engine.plan().kv.page_tokens;
    const auto keep = [&](int64_t length) {
      if (length == shared) return;
      const auto count = static_cast<size_t>((length + page_tokens - 1) / page_tokens);
      if (kept()) path.nodes.resize(count);
      blocks.resize(count);
      shared = length;
      take = false;
    };
    keep(std::clamp<int64_t>(most, 0, shared));
    keep(engine.usable(blocks, shared));
  }
};

PrefixCache::PrefixCache(Engine& engine)
    : engine_(engine), kept_(std::make_unique<PrefixTree>(engine.plan().kv.page_tokens)) {}

PrefixCache::~PrefixCache() {
  try {
    clear();
  } catch (...) {  // a failed device also fails the next step
  }
}

PrefixCache::Match PrefixCache::kept_match(std::span<const int32_t> tokens) const {
  Match found;
  found.path = kept_->find(tokens);
  found.blocks = found.path.blocks();
  found.shared = found.path.shared;
  found.take = found.path.whole();
  found.cut(engine_, found.shared);
  return found;
}

PrefixCache::Match PrefixCache::match(std::span<const int32_t> prompt) const {
  const auto wanted = prompt.first(prompt.empty() ? 0 : prompt.size() - 1);
  Match best = kept_match(wanted);
  if (best.shared < kLeastShared && !best.take) best = {};
  for (const auto& [sequence, tokens] : in_use_) {
    const int64_t held = std::min(engine_.length(sequence), std::ssize(tokens));
    const auto known = std::span(tokens).first(static_cast<size_t>(held));
    Match other;
    other.shared = common_prefix(known, wanted);
    if (other.shared < kLeastShared || other.shared <= best.shared) continue;
    other.blocks = engine_.blocks(sequence, other.shared);
    other.cut(engine_, other.shared);
    if (other.shared >= kLeastShared && other.shared > best.shared) best = std::move(other);
  }
  return best;
}

int64_t PrefixCache::find(std::span<const int32_t> prompt) const {
  return match(prompt).shared;
}

// Room for a sequence that begins with the match. Where nothing else is left to give way, the last
// block of a kept match is taken, with what else it holds.
bool PrefixCache::make_room(Match& match, int64_t capacity, int64_t spare) {
  if (engine_.can_open(capacity, spare, match.prefix())) return true;
  HeldPrefix least = match.prefix();
  least.take = match.kept();
  if (!engine_.can_open(capacity, spare, least, kept_->others())) return false;
  while (!engine_.can_open(capacity, spare, match.prefix())) {
    if (drop_oldest()) continue;
    if (match.take || !match.kept()) return false;
    match.take = true;  // nothing begins with it any more
  }
  return true;
}

std::optional<PrefixCache::Opened> PrefixCache::try_open(std::span<const int32_t> prompt,
                                                         int64_t capacity, int64_t spare) {
  Match found = match(prompt);
  found.cut(engine_, capacity);
  kept_->touch(found.path);
  if (!make_room(found, capacity, spare)) return std::nullopt;
  const SequenceId sequence = engine_.open(capacity, found.prefix());
  kept_->update(found.path, found.blocks);
  in_use_[sequence] = {prompt.begin(), prompt.end()};
  return Opened{sequence, found.shared};
}

PrefixCache::Opened PrefixCache::open(std::span<const int32_t> prompt, int64_t capacity) {
  const Limits& limits = engine_.plan().limits;
  if (capacity >= 1 && capacity <= limits.context) {
    if (const std::optional<Opened> opened = try_open(prompt, capacity)) return *opened;
  }
  const SequenceId sequence = engine_.open(capacity);  // says why it cannot
  in_use_[sequence] = {prompt.begin(), prompt.end()};
  return {sequence, 0};
}

bool PrefixCache::fits(int64_t capacity) const {
  const Plan& plan = engine_.plan();
  const auto blocks_for = [&](int64_t positions) {
    return (positions + plan.kv.page_tokens - 1) / plan.kv.page_tokens;
  };
  int64_t blocks = blocks_for(capacity);
  for (const auto& [sequence, tokens] : in_use_) blocks += blocks_for(engine_.capacity(sequence));
  return blocks <= plan.kv.blocks && std::ssize(in_use_) < plan.limits.sequences;
}

void PrefixCache::keep(SequenceId sequence, std::span<const int32_t> tokens) {
  in_use_.erase(sequence);  // whatever fails
  const int64_t length = std::min(engine_.length(sequence), std::ssize(tokens));
  const std::vector<HeldBlock> held = engine_.detach(sequence, length);
  engine_.release(kept_->insert(tokens.first(static_cast<size_t>(length)), held));
}

void PrefixCache::close(SequenceId sequence) {
  in_use_.erase(sequence);
  engine_.close(sequence);
}

bool PrefixCache::drop_oldest() {
  const std::vector<HeldBlock> dropped = kept_->drop_oldest();
  engine_.release(dropped);
  return !dropped.empty();
}

bool PrefixCache::give_way() {
  kept_->tick();
  return drop_oldest();
}

void PrefixCache::clear() {
  while (give_way()) {
  }
}

int64_t PrefixCache::kept() const {
  return kept_->leaves();
}

bool PrefixCache::leave_near() {
  kept_->tick();
  const PrefixTree::Path found = kept_->oldest(
      [&](const PrefixTree::Path& path) { return engine_.near_blocks(path.blocks()) > 0; });
  if (found.nodes.empty()) return false;
  const std::vector<HeldBlock> blocks = found.blocks();
  if (engine_.can_leave(blocks)) {
    engine_.leave(blocks);
  } else {
    engine_.release(kept_->drop(found));
  }
  return true;
}

bool PrefixCache::leave_far() {
  kept_->tick();
  const PrefixTree::Path found = kept_->oldest([&](const PrefixTree::Path& path) {
    return engine_.near_blocks(path.blocks()) < std::ssize(path.nodes);
  });
  if (!found.nodes.empty()) engine_.release(kept_->drop(found));
  return !found.nodes.empty();
}

int64_t PrefixCache::save(std::span<const int32_t> tokens, const std::string& path,
                          const std::string& metadata, const Progress& progress) {
  Match found = kept_match(tokens);
  if (found.shared == 0) {
    fail(ErrorKind::kInvalid, "[kv] nothing is kept of these ", tokens.size(),
         " tokens; save right after they were computed");
  }
  const auto saved = tokens.first(static_cast<size_t>(found.shared));
  engine_.save(found.blocks, saved, path, metadata, progress);
  return found.shared;
}

std::pair<std::vector<int32_t>, std::string> PrefixCache::load(const std::string& path,
                                                               const Progress& progress) {
  while (true) {
    try {
      LoadedSequence loaded = engine_.load(path, 1, progress);
      in_use_[loaded.sequence] = {};
      keep(loaded.sequence, loaded.tokens);
      return {std::move(loaded.tokens), std::move(loaded.metadata)};
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCapacity || !give_way()) throw;
    }
  }
}

}  // namespace helm
