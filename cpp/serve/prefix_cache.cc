#include "helm/prefix_cache.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"

namespace helm {

int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const auto least = static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  return std::mismatch(a.begin(), a.begin() + least, b.begin()).first - a.begin();
}

PrefixCache::~PrefixCache() {
  try {
    clear();
  } catch (...) {  // a failed device also fails the next step
  }
}

PrefixCache::Match PrefixCache::match(std::span<const int32_t> prompt) const {
  Match best;
  int64_t used = -1;
  for (const auto& [sequence, entry] : entries_) {
    const int64_t held = std::min(engine_.length(sequence), std::ssize(entry.tokens));
    const auto known = std::span(entry.tokens).first(static_cast<size_t>(held));
    const int64_t shared = std::min(common_prefix(known, prompt), std::ssize(prompt) - 1);
    const bool whole = !entry.in_use && shared == held;
    if (shared < 1 || (shared < kLeastShared && !whole)) continue;
    if (!engine_.continues(sequence, shared)) continue;
    if (std::tuple(shared, whole, entry.used) <= std::tuple(best.shared, best.whole, used)) {
      continue;
    }
    best = {sequence, shared, whole};
    used = entry.used;
  }
  return best;
}

int64_t PrefixCache::find(std::span<const int32_t> prompt) const {
  return match(prompt).shared;
}

// A sequence of the match's positions, if there is room: the matching one itself where nothing is
// lost or, with `cut`, what else it holds is given up.
std::optional<SequenceId> PrefixCache::start(const Match& match, int64_t capacity, int64_t spare,
                                             bool cut) {
  if (match.whole || (cut && match.shared > 0 && !entries_.at(match.sequence).in_use)) {
    if (!engine_.can_resize(match.sequence, match.shared, capacity, spare)) return std::nullopt;
    engine_.resize(match.sequence, match.shared, capacity);
    return match.sequence;
  }
  if (!engine_.can_open(capacity, match.shared, spare)) return std::nullopt;
  if (match.shared == 0) return engine_.open(capacity);
  return engine_.fork(match.sequence, match.shared, capacity);
}

std::optional<PrefixCache::Opened> PrefixCache::try_open(std::span<const int32_t> prompt,
                                                         int64_t capacity, int64_t spare) {
  Match found = match(prompt);
  if (found.shared > capacity) found = {found.sequence, std::max<int64_t>(capacity, 0), false};
  if (found.shared > 0 && !engine_.continues(found.sequence, found.shared)) found = {};
  if (found.shared > 0) entries_.at(found.sequence).used = ++clock_;
  std::optional<SequenceId> sequence = start(found, capacity, spare, false);
  while (!sequence && drop_oldest(found.sequence)) sequence = start(found, capacity, spare, false);
  if (!sequence) sequence = start(found, capacity, spare, true);
  if (!sequence && drop_oldest(-1)) {
    found = {};
    sequence = start(found, capacity, spare, false);
  }
  if (!sequence) return std::nullopt;
  entries_[*sequence] = {{prompt.begin(), prompt.end()}, true, ++clock_};
  return Opened{*sequence, found.shared};
}

PrefixCache::Opened PrefixCache::open(std::span<const int32_t> prompt, int64_t capacity) {
  const Limits& limits = engine_.plan().limits;
  if (capacity >= 1 && capacity <= limits.context) {
    if (const std::optional<Opened> opened = try_open(prompt, capacity)) return *opened;
  }
  const SequenceId sequence = engine_.open(capacity);  // says why it cannot
  entries_[sequence] = {{prompt.begin(), prompt.end()}, true, ++clock_};
  return {sequence, 0};
}

bool PrefixCache::fits(int64_t capacity) const {
  const Plan& plan = engine_.plan();
  const auto blocks_for = [&](int64_t positions) {
    return (positions + plan.kv.page_tokens - 1) / plan.kv.page_tokens;
  };
  int64_t blocks = blocks_for(capacity);
  int64_t sequences = 1;
  for (const auto& [sequence, entry] : entries_) {
    if (!entry.in_use) continue;
    blocks += blocks_for(engine_.capacity(sequence));
    ++sequences;
  }
  return blocks <= plan.kv.blocks && sequences <= plan.limits.sequences;
}

void PrefixCache::keep(SequenceId sequence, std::span<const int32_t> tokens) {
  entries_.erase(sequence);  // in use no more, whatever fails
  const int64_t length = std::min(engine_.length(sequence), std::ssize(tokens));
  const auto held = tokens.first(static_cast<size_t>(length));
  // Cutting off pages that others share may need pages in their place.
  if (length == 0 || !engine_.can_resize(sequence, length, length)) return close(sequence);
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& [other, entry] = *it++;
    if (entry.in_use) continue;
    const int64_t shared = common_prefix(entry.tokens, held);
    if (shared == length) {
      entry.used = ++clock_;
      return close(sequence);
    }
    if (shared == std::ssize(entry.tokens)) close(other);
  }
  engine_.resize(sequence, length, length);
  entries_[sequence] = {{held.begin(), held.end()}, false, ++clock_};
}

void PrefixCache::close(SequenceId sequence) {
  entries_.erase(sequence);
  engine_.close(sequence);
}

bool PrefixCache::give_way() {
  return drop_oldest(-1);
}

void PrefixCache::clear() {
  while (drop_oldest(-1)) {
  }
}

int64_t PrefixCache::kept() const {
  return std::count_if(entries_.begin(), entries_.end(),
                       [](const auto& entry) { return !entry.second.in_use; });
}

// Of what is kept and fits, that used least recently; -1: nothing is.
template <typename Fits>
SequenceId PrefixCache::oldest(const Fits& fits) const {
  auto oldest = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->second.in_use || !fits(it->first)) continue;
    if (oldest == entries_.end() || it->second.used < oldest->second.used) oldest = it;
  }
  return oldest == entries_.end() ? -1 : oldest->first;
}

bool PrefixCache::drop_oldest(SequenceId except) {
  const SequenceId found = oldest([&](SequenceId one) { return one != except; });
  if (found >= 0) close(found);
  return found >= 0;
}

bool PrefixCache::leave_near() {
  const SequenceId found = oldest([&](SequenceId one) { return engine_.near_blocks(one) > 0; });
  if (found < 0) return false;
  if (engine_.can_move(found, KvSide::kFar)) {
    engine_.move(found, KvSide::kFar);
  } else {
    close(found);
  }
  return true;
}

int64_t PrefixCache::save(std::span<const int32_t> tokens, const std::string& path,
                          const std::string& metadata, const Progress& progress) {
  SequenceId best = -1;
  int64_t most = 0;
  for (const auto& [sequence, entry] : entries_) {
    if (entry.in_use) continue;
    const int64_t shared = common_prefix(entry.tokens, tokens);
    if (shared > most && engine_.continues(sequence, shared))
      std::tie(best, most) = std::pair(sequence, shared);
  }
  if (most == 0) {
    fail(ErrorKind::kInvalid, "[kv] nothing is kept of these ", tokens.size(),
         " tokens; save right after they were computed");
  }
  engine_.save(best, tokens.first(static_cast<size_t>(most)), path, metadata, progress);
  return most;
}

std::pair<std::vector<int32_t>, std::string> PrefixCache::load(const std::string& path,
                                                               const Progress& progress) {
  while (true) {
    try {
      LoadedSequence loaded = engine_.load(path, 1, progress);
      entries_[loaded.sequence] = {};
      keep(loaded.sequence, loaded.tokens);
      return {std::move(loaded.tokens), std::move(loaded.metadata)};
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCapacity || !drop_oldest(-1)) throw;
    }
  }
}

}  // namespace helm
