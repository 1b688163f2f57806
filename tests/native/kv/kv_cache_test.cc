// The account of KV blocks: whatever sequences share, what is reserved is there and comes back.
#include "kv/cache.h"
#include "support/this_build.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

namespace {

using helm::KvCache;
using helm::KvSequence;

constexpr int64_t kPage = 4;
constexpr int64_t kMostPositions = 20;

helm::Plan plan_of(int64_t blocks) {
  helm::Plan plan;
  plan.kv.page_tokens = kPage;
  plan.kv.layers = {{0, 0, 1}};
  plan.kv.blocks = blocks;
  return plan;
}

// One entry that sees all positions, one with a window. Sequences grow by a page at once.
helm::Plan windowed_plan(int64_t blocks, int64_t window, int64_t sequences) {
  helm::Plan plan = plan_of(blocks);
  plan.kv.layers = {{0, 0, 1}, {1, 0, 1, window}};
  const int64_t most = plan.kv.most_window_blocks(kPage, sequences);
  plan.kv.window_blocks = most < blocks ? most : 0;
  return plan;
}

KvSequence fork(KvCache& kv, const KvSequence& source, int64_t length, int64_t capacity) {
  std::vector<helm::HeldBlock> shared = kv.blocks(source, length);
  return kv.open(capacity, {shared, length});
}

// As a step does.
void append(KvCache& kv, KvSequence& sequence, int64_t tokens) {
  if (kv.shares_last(sequence)) kv.own(sequence, sequence.blocks.size() - 1);
  kv.leave_behind(sequence, sequence.length);
  kv.extend(sequence, sequence.length + tokens);
  kv.grown(sequence, sequence.length + tokens);
}

}  // namespace

TEST_CASE("a copy of a shared block takes the block that was reserved for it") {
  KvCache kv(plan_of(5), {helm::kCpu});
  KvSequence a = kv.open(12);
  append(kv, a, 10);
  KvSequence b = fork(kv, a, 8, 12);  // with a it holds a's second block whole, c its middle
  KvSequence c = fork(kv, a, 5, 8);
  CHECK(kv.unreserved() == 0);
  append(kv, c, 1);
  CHECK(kv.unreserved() == 0);
  CHECK(kv.blocks_to_truncate(a, 10) == 0);
  kv.close(b);
  CHECK(kv.unreserved() == 1);
  kv.close(a);
  kv.close(c);
  CHECK(kv.unreserved() == 5);
}

TEST_CASE("any order of calls keeps the account") {
  for (uint32_t seed = 0; seed < (helm::test::kFew ? 150 : 3000); ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto from = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    const int64_t blocks = from(4, 14);
    KvCache kv(plan_of(blocks), {helm::kCpu});
    std::vector<KvSequence> open;
    const auto pick = [&]() -> size_t {
      return static_cast<size_t>(from(0, std::ssize(open) - 1));
    };
    for (int action = 0; action < 60; ++action) {
      const int64_t kind = open.empty() ? 0 : from(0, 19);
      if (kind < 4) {
        const int64_t capacity = from(1, kMostPositions);
        if (kv.blocks_for(capacity) <= kv.unreserved()) open.push_back(kv.open(capacity));
      } else if (kind < 8) {
        const KvSequence& source = open[pick()];
        const int64_t length = from(0, source.length);
        const int64_t capacity = from(std::max<int64_t>(length, 1), kMostPositions);
        std::vector<helm::HeldBlock> shared = kv.blocks(source, length);
        if (kv.blocks_to_open(capacity, {shared, length}) > kv.unreserved()) continue;
        open.push_back(fork(kv, source, length, capacity));
      } else if (kind < 15) {
        KvSequence& one = open[pick()];
        if (one.length < one.capacity) append(kv, one, from(1, one.capacity - one.length));
      } else if (kind < 18) {
        KvSequence& one = open[pick()];
        const int64_t length = from(0, one.length);
        const int64_t capacity = from(std::max<int64_t>(length, 1), kMostPositions);
        if (kv.blocks_to_resize(one, length, capacity) > kv.unreserved()) continue;
        kv.resize(one, length, capacity);
      } else {
        const size_t at = pick();
        kv.close(open[at]);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      }
      REQUIRE(kv.unreserved() >= 0);
    }
    for (KvSequence& one : open) kv.close(one);
    REQUIRE(kv.unreserved() == blocks);
  }
}

TEST_CASE("windows have their pages whatever the order of calls, and give all of them back") {
  for (uint32_t seed = 0; seed < (helm::test::kFew ? 300 : 3000); ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto from = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    constexpr int64_t kSequences = 3, kMost = 60;
    const int64_t window = from(1, 11);
    KvCache kv(windowed_plan(50, window, kSequences), {helm::kCpu, helm::kCpu});
    REQUIRE(kv.windows().slots() > 0);
    std::vector<KvSequence> open;
    const auto pick = [&]() -> size_t {
      return static_cast<size_t>(from(0, std::ssize(open) - 1));
    };
    for (int action = 0; action < 120; ++action) {
      const int64_t kind = open.empty() ? 0 : from(0, 19);
      const bool full = std::ssize(open) == kSequences;
      if (kind < 2 && !full && kv.blocks_for(kMost) <= kv.unreserved()) {
        open.push_back(kv.open(kMost));
      } else if (kind < 4 && !full) {
        if (open.empty()) continue;
        const KvSequence source = open[pick()];
        const int64_t length = from(0, source.length);
        std::vector<helm::HeldBlock> shared = kv.blocks(source, length);
        REQUIRE((kv.usable(shared, length) == length || !kv.continues(source, length)));
        const bool room = kv.blocks_to_open(kMost, {shared, length}) <= kv.unreserved();
        if (room && kv.continues(source, length)) {
          open.push_back(fork(kv, source, length, kMost));
        }
      } else if (kind < 16) {
        KvSequence& one = open[pick()];
        const int64_t length = one.length;
        const int64_t most = std::min(kPage, one.capacity - length);
        if (most > 0) append(kv, one, from(1, most));
        REQUIRE(kv.continues(one, length));
      } else if (kind < 18) {
        KvSequence& one = open[pick()];
        const int64_t length = from(0, one.length);
        if (!kv.continues(one, length)) continue;
        if (kv.blocks_to_resize(one, length, kMost) > kv.unreserved()) continue;
        kv.resize(one, length, kMost);
      } else if (kind == 18) {
        const size_t at = pick();
        kv.close(open[at]);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      }
      REQUIRE(kv.windows().free() >= 0);
      for (const KvSequence& one : open) {  // all that the next position's window shows is there
        const int64_t begin = std::max<int64_t>(0, one.length - window + 1);
        for (int64_t at = begin; at < one.length; ++at) {
          std::vector<int32_t> pages;
          kv.append_pages(kv.block(one.blocks[static_cast<size_t>(at / kPage)]), false, pages);
          REQUIRE(pages[1] >= 50);
          REQUIRE(pages[1] < 50 + kv.windows().slots());
        }
      }
    }
    for (KvSequence& one : open) kv.close(one);
    REQUIRE(kv.unreserved() == 50);
    REQUIRE(kv.windows().used() == 0);
  }
}

TEST_CASE("what is far is always the first blocks, whatever moves, and all slots come back") {
  int64_t moves = 0, evictions = 0;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto from = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    const int64_t blocks = from(16, 30), slots = from(8, 15);
    helm::Plan plan = plan_of(blocks);
    plan.pages = {blocks, slots};
    KvCache kv(plan, {helm::DeviceIndex{1}});
    REQUIRE(kv.overflows());
    std::vector<KvSequence> open;
    const auto pick = [&]() -> size_t {
      return static_cast<size_t>(from(0, std::ssize(open) - 1));
    };
    const auto evict = [&](int32_t block) { kv.release_near(kv.evict(block)); };
    const auto recall = [&](int32_t block) { kv.release_far(kv.recall(block)); };
    // As the engine makes room for a step of one sequence.
    const auto grow = [&](KvSequence& one, int64_t tokens) {
      const int64_t added = kv.blocks_to_extend(one, tokens);
      one.far = one.far && tokens == 1 && added <= kv.far().free();
      if (!one.far) {
        if (!kv.shares_last(one)) kv.keep_last_near(one);
        const bool back = !kv.shares_last(one) && kv.last_is_far(one);
        while (kv.near().free() < added + (back ? 1 : 0)) {
          REQUIRE(kv.oldest_near());
          if (kv.far().free() == 0) {
            REQUIRE(back);
            kv.exchange(one.blocks.back());
            break;
          }
          evict(*kv.oldest_near());
          ++evictions;
        }
        if (back && kv.last_is_far(one)) recall(one.blocks.back());
      }
      append(kv, one, tokens);
    };
    for (int action = 0; action < 80; ++action) {
      const int64_t kind = open.empty() ? 0 : from(0, 19);
      if (kind < 3 && std::ssize(open) < 3) {
        if (kv.blocks_for(kMostPositions) <= kv.unreserved()) {
          open.push_back(kv.open(kMostPositions));
        }
      } else if (kind < 5 && !open.empty() && std::ssize(open) < 3) {
        const KvSequence source = open[pick()];
        const int64_t length = from(0, source.length);
        std::vector<helm::HeldBlock> shared = kv.blocks(source, length);
        if (kv.blocks_to_open(kMostPositions, {shared, length}) > kv.unreserved()) continue;
        if (kv.usable(shared, length) < length) continue;
        open.push_back(kv.open(kMostPositions, {shared, length}));
        open.back().far = source.far;
      } else if (kind < 13) {
        KvSequence& one = open[pick()];
        const int64_t most = std::min<int64_t>(kPage, one.capacity - one.length);
        if (most > 0) grow(one, from(1, most));
      } else if (kind < 14) {
        KvSequence& one = open[pick()];
        const int64_t length = from(0, one.length);
        if (kv.blocks_to_resize(one, length, kMostPositions) > kv.unreserved()) continue;
        kv.resize(one, length, kMostPositions);
      } else if (kind < 18) {
        KvSequence& one = open[pick()];
        const bool far = from(0, 1) == 1;
        const KvCache::Move move = kv.to_move(one, far);
        if (move.slots > (far ? kv.far() : kv.near()).free()) continue;
        if (move.copies > kv.unreserved()) continue;
        one.far = far;
        for (size_t b = 0; b < one.blocks.size(); ++b) {
          const helm::KvBlock& block = kv.block(one.blocks[b]);
          if ((far ? block.far : block.near) != helm::KvBlock::kNone) continue;
          if (block.references > 1) {
            kv.own(one, b);
          } else {
            far ? evict(one.blocks[b]) : recall(one.blocks[b]);
          }
        }
        if (!far) kv.came_near(one, move.slots);
        REQUIRE(kv.near_blocks(one) == (far ? 0 : std::ssize(one.blocks)));
        moves += move.slots;
      } else if (kind == 18) {
        const size_t at = pick();
        kv.close(open[at]);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      }
      REQUIRE(kv.unreserved() >= 0);
      REQUIRE(kv.near().free() >= 0);
      REQUIRE(kv.far().free() >= 0);
      for (const KvSequence& one : open) {
        for (int64_t b = kv.far_blocks(one); b < std::ssize(one.blocks); ++b) {
          REQUIRE(kv.block(one.blocks[static_cast<size_t>(b)]).near != helm::KvBlock::kNone);
          REQUIRE(!one.far);
        }
      }
    }
    for (KvSequence& one : open) kv.close(one);
    REQUIRE(kv.unreserved() == blocks);
    REQUIRE(kv.near().used() + kv.far().used() == 0);
  }
  CHECK(moves > 1000);
  CHECK(evictions > 100);
}
