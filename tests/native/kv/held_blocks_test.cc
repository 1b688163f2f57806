// Blocks that are held without a sequence: in any order of calls every sequence finds in its blocks
// what it wrote or began with, what windows show is there, far blocks come first, and all come
// back.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "kv/cache.h"

namespace {

using helm::HeldBlock;
using helm::HeldPrefix;
using helm::KvBlock;
using helm::KvCache;
using helm::KvSequence;
using Values = std::vector<int32_t>;

constexpr int64_t kPage = 4;
constexpr int64_t kBlocks = 26;
constexpr int64_t kSequences = 4;
constexpr int64_t kMost = 40;  // positions of a sequence

enum class Kind : uint8_t { kPlain, kWindow, kOverflow };

helm::Plan plan_of(Kind kind, int64_t window) {
  helm::Plan plan;
  plan.kv.page_tokens = kPage;
  plan.kv.layers = {{0, 0, 1}};
  plan.kv.blocks = kBlocks;
  if (kind == Kind::kWindow) {
    plan.kv.layers.push_back({1, 0, 1, window});
    plan.kv.window_blocks = plan.kv.most_window_blocks(kPage, kSequences);
  }
  if (kind == Kind::kOverflow) plan.pages = {0, 1 + 2 * kSequences};
  return plan;
}

// What an engine and a prefix cache do, without pages: blocks have values instead.
class Blocks {
 public:
  struct Live {
    KvSequence kv;
    Values values;
  };
  struct Held {
    std::vector<HeldBlock> blocks;
    Values values;
  };

  Blocks(Kind kind, int64_t window)
      : plan_(plan_of(kind, window)),
        window_(window),
        kv_(plan_, std::vector<helm::DeviceIndex>(plan_.kv.layers.size(),
                                                  kind == Kind::kOverflow ? 1 : helm::kCpu)) {}

  KvCache& kv() { return kv_; }
  bool windows() const { return plan_.kv.window_blocks > 0; }

  // As Engine::can_open().
  bool has_room(int64_t capacity, const HeldPrefix& prefix, int64_t open) const {
    if (open >= kSequences || kv_.blocks_to_open(capacity, prefix) > kv_.unreserved()) return false;
    const int64_t taken = prefix.take ? kv_.windows_of(prefix.blocks) : 0;
    return !windows() ||
           plan_.kv.most_window_blocks(kPage, open + 1) + kv_.held_windows() - taken <=
               plan_.kv.window_blocks;
  }

  // As a step does.
  void append(Live& live, const Values& more) {
    KvSequence& one = live.kv;
    const int64_t end = one.length + std::ssize(more);
    int64_t added = kv_.blocks_for(end) - std::ssize(one.blocks) + kv_.shares_last(one);
    if (!kv_.shares_last(one)) kv_.keep_last_near(one);
    if (kv_.overflows()) {
      while (kv_.near().free() < added) evict();
      if (!kv_.shares_last(one) && kv_.last_is_far(one)) recall(one.blocks.back());
    }
    if (kv_.shares_last(one)) {
      const int32_t shared = kv_.own(one, one.blocks.size() - 1);
      content_[one.blocks.back()] = content_[shared];
      // Where no other shows it, the copy has the slot itself.
      const int32_t from = kv_.block(shared).window;
      if (from != KvBlock::kNone) seen_[kv_.block(one.blocks.back()).window] = seen_[from];
    }
    kv_.leave_behind(one, one.length);
    kv_.extend(one, end);
    for (const int32_t value : more) {
      const auto at = static_cast<size_t>(std::ssize(live.values) % kPage);
      const int32_t block = one.blocks[static_cast<size_t>(std::ssize(live.values) / kPage)];
      content_[block].resize(kPage);
      seen_[kv_.block(block).window].resize(kPage);
      content_[block][at] = seen_[kv_.block(block).window][at] = value;
      live.values.push_back(value);
    }
    kv_.grown(one, end);
  }

  void evict() {
    const auto block = kv_.oldest_near();
    REQUIRE(block.has_value());
    kv_.release_near(kv_.evict(*block));
  }

  void check(const Live& live) const {
    const KvSequence& one = live.kv;
    REQUIRE(one.length == std::ssize(live.values));
    bool near = false;
    for (int64_t at = 0; at < one.length; ++at) {
      const int32_t index = one.blocks[static_cast<size_t>(at / kPage)];
      const KvBlock& block = kv_.block(index);
      const auto offset = static_cast<size_t>(at % kPage);
      REQUIRE(content_.at(index)[offset] == live.values[static_cast<size_t>(at)]);
      if (kv_.overflows()) {
        REQUIRE(!(near && block.far != KvBlock::kNone));
        near |= block.near != KvBlock::kNone;
      }
      if (windows() && at > one.length - window_) {
        REQUIRE(block.window != KvBlock::kNone);
        REQUIRE(seen_.at(block.window)[offset] == live.values[static_cast<size_t>(at)]);
      }
    }
  }

 private:
  void recall(int32_t block) {
    if (kv_.near().free() == 0 && kv_.far().free() == 0) {
      REQUIRE(kv_.oldest_near().has_value());
      kv_.exchange(block);
      return;
    }
    if (kv_.near().free() == 0) evict();
    kv_.release_far(kv_.recall(block));
  }

  helm::Plan plan_;
  int64_t window_;
  KvCache kv_;
  std::map<int32_t, Values> content_;  // by block
  std::map<int32_t, Values> seen_;     // by slot of windows
};

// How many sequences began with what others had.
int64_t run(Kind kind, uint32_t seed) {
  std::mt19937 random(seed);
  const auto from = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint32_t>(high - low + 1));
  };
  Blocks blocks(kind, from(1, 11));
  KvCache& kv = blocks.kv();
  std::vector<Blocks::Live> open;
  std::vector<Blocks::Held> kept;
  int32_t next_value = 0;
  int64_t begun = 0;
  const auto begin = [&](std::vector<HeldBlock>& with, const Values& values, bool take) {
    int64_t length = from(0, std::ssize(values));
    with.resize(static_cast<size_t>(kv.blocks_for(length)));
    length = kv.usable(with, length);
    with.resize(static_cast<size_t>(kv.blocks_for(length)));
    const HeldPrefix prefix{with, length, take};
    const int64_t capacity = std::min(kMost, length + from(1, 12));
    if (!blocks.has_room(capacity, prefix, std::ssize(open))) return false;
    open.push_back({kv.open(capacity, prefix), {values.begin(), values.begin() + length}});
    REQUIRE(kv.continues(open.back().kv, length));
    begun += length > 0;
    return true;
  };
  const auto release = [&](const std::vector<HeldBlock>& held) {
    for (const HeldBlock& one : held) {
      if (one.block < 0) continue;
      const int64_t free = kv.unreserved() + kv.freed_by({&one, 1});
      kv.release(one);
      REQUIRE(kv.unreserved() == free);
    }
  };
  for (int action = 0; action < 150; ++action) {
    const int64_t what = from(0, 19);
    const auto live = open.begin() + (open.empty() ? 0 : from(0, std::ssize(open) - 1));
    const auto some = kept.begin() + (kept.empty() ? 0 : from(0, std::ssize(kept) - 1));
    if (what < 2) {
      std::vector<HeldBlock> none;
      begin(none, {}, false);
    } else if (what < 4 && !open.empty()) {
      std::vector<HeldBlock> shared = kv.blocks(live->kv, live->kv.length);
      begin(shared, Values(live->values), false);
    } else if (what < 7 && !kept.empty()) {
      std::vector<HeldBlock> shared = some->blocks;
      Values values = some->values;
      if (from(0, 1) == 0) {  // the rest behind the beginning of another
        const Blocks::Held& stem = kept[static_cast<size_t>(from(0, std::ssize(kept) - 1))];
        const int64_t most = std::min(std::ssize(stem.values), std::ssize(values)) / kPage;
        const int64_t count = from(0, most);
        std::copy_n(stem.blocks.begin(), count, shared.begin());
        std::copy_n(stem.values.begin(), count * kPage, values.begin());
      }
      begin(shared, values, false);
    } else if (what < 9 && !kept.empty()) {
      std::vector<HeldBlock> taken = some->blocks;
      if (begin(taken, some->values, true)) {
        std::copy(taken.begin(), taken.end(), some->blocks.begin());
        release(some->blocks);
        kept.erase(some);
      }
    } else if (what < 15 && !open.empty()) {
      const int64_t most = std::min(kPage, live->kv.capacity - live->kv.length);
      Values more(static_cast<size_t>(most > 0 ? from(1, most) : 0));
      for (int32_t& value : more) value = next_value++;
      if (most > 0) blocks.append(*live, more);
    } else if (what < 17 && !open.empty()) {
      const int64_t length = from(0, live->kv.length);
      live->values.resize(static_cast<size_t>(length));
      kept.push_back({kv.detach(live->kv, length), live->values});
      open.erase(live);
    } else if (what == 17 && !kept.empty()) {
      release(some->blocks);
      kept.erase(some);
    } else if (what == 18 && !open.empty()) {
      const int64_t length = from(0, live->kv.length);
      if (!kv.continues(live->kv, length)) continue;
      if (kv.blocks_to_truncate(live->kv, length) > kv.unreserved()) continue;
      kv.truncate(live->kv, length);
      live->values.resize(static_cast<size_t>(length));
    } else if (kv.overflows() && kv.far().free() > 0 && kv.oldest_near()) {
      blocks.evict();
    }
    REQUIRE(kv.unreserved() >= 0);
    REQUIRE(kv.windows().free() >= 0);
    for (const Blocks::Live& one : open) blocks.check(one);
  }
  for (Blocks::Live& one : open) kv.close(one.kv);
  for (const Blocks::Held& one : kept) release(one.blocks);
  REQUIRE(kv.unreserved() == kBlocks);
  REQUIRE(kv.windows().used() == 0);
  REQUIRE(kv.held_windows() == 0);
  return begun;
}

}  // namespace

TEST_CASE("held blocks keep what was written, and the account") {
  for (const Kind kind : {Kind::kPlain, Kind::kWindow, Kind::kOverflow}) {
    CAPTURE(kind);
    int64_t begun = 0;
    for (uint32_t seed = 0; seed < 200; ++seed) {
      CAPTURE(seed);
      begun += run(kind, seed);
    }
    CHECK(begun > 800);
  }
}

TEST_CASE("a block that is taken needs no copy, one that is shared needs one") {
  KvCache kv(plan_of(Kind::kPlain, 0), {helm::kCpu});
  KvSequence first = kv.open(6);
  kv.extend(first, 6);
  kv.grown(first, 6);
  std::vector<HeldBlock> held = kv.detach(first, 6);
  CHECK(kv.unreserved() == kBlocks - 2);
  CHECK(kv.blocks_to_open(6, {held, 6, false}) == 1);
  CHECK(kv.blocks_to_open(6, {held, 6, true}) == 0);
  KvSequence shares = kv.open(6, {held, 6, false});
  CHECK(kv.shares_last(shares));
  KvSequence takes = kv.open(6, {held, 6, true});
  CHECK(held[0].block >= 0);
  CHECK(held[1].block == -1);
  CHECK(kv.shares_last(takes));  // with the other
  kv.close(shares);
  CHECK(!kv.shares_last(takes));
  kv.close(takes);
  kv.release(held[0]);
  CHECK(kv.unreserved() == kBlocks);
}

TEST_CASE("blocks that would leave before the one they stand behind are not begun with") {
  KvCache kv(plan_of(Kind::kOverflow, 0), {1});
  const auto grow = [&](KvSequence& one, int64_t length) {
    kv.extend(one, length);
    kv.grown(one, length);
  };
  KvSequence first = kv.open(3 * kPage), second = kv.open(3 * kPage);
  grow(first, kPage);
  grow(second, 3 * kPage);
  grow(first, 3 * kPage);
  const std::vector<HeldBlock> a = kv.detach(first, 3 * kPage);
  const std::vector<HeldBlock> b = kv.detach(second, 3 * kPage);
  const std::vector<HeldBlock> right = {b[0], a[1]}, wrong = {a[0], b[1]};
  const auto both = [&] {
    return std::pair(kv.usable(right, 2 * kPage), kv.usable(wrong, 2 * kPage));
  };
  CHECK(both() == std::pair(2 * kPage, kPage));
  for (const int64_t usable : {kPage, kPage, 2 * kPage}) {  // b[0], b[1] and a[0] leave in turn
    kv.release_near(kv.evict(*kv.oldest_near()));
    CHECK(both() == std::pair(2 * kPage, usable));
  }
  CHECK(kv.block(a[0].block).far != KvBlock::kNone);
  CHECK(kv.block(b[1].block).far != KvBlock::kNone);
}
