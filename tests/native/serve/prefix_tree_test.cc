// Prefixes as a tree of blocks, beside a flat list of all that it was told: it finds as much, gives
// up in the same order, loses no block, and what it finds has the tokens asked for.
#include "serve/prefix_tree.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "helm/prefix_cache.h"

namespace {

using helm::HeldBlock;
using helm::PrefixTree;
using Ids = std::vector<int32_t>;

constexpr int64_t kPage = 4;

// Every block with all tokens up to its end.
class Naive {
 public:
  int64_t find(const Ids& tokens) const {
    int64_t most = 0;
    for (const auto& [prefix, one] : all_) {
      most = std::max(most, helm::common_prefix(prefix, tokens));
    }
    return most;
  }

  void touch(const std::vector<HeldBlock>& used, int64_t now) {
    for (auto& [prefix, one] : all_) {
      if (std::ranges::find(used, one.held) != used.end()) one.used = now;
    }
  }

  void insert(const Ids& tokens, const std::vector<HeldBlock>& blocks, int64_t now) {
    for (size_t b = 0; b < blocks.size(); ++b) {
      const auto end =
          std::min(static_cast<int64_t>(tokens.size()), static_cast<int64_t>(b + 1) * kPage);
      const Ids prefix(tokens.begin(), tokens.begin() + end);
      // A block of fewer tokens that this one begins with is replaced.
      for (int64_t less = end - 1; less > static_cast<int64_t>(b) * kPage; --less) {
        all_.erase(Ids(prefix.begin(), prefix.begin() + less));
      }
      const auto longer = std::ranges::find_if(all_, [&](const auto& known) {
        const auto size = static_cast<int64_t>(known.first.size());
        return (size - 1) / kPage == static_cast<int64_t>(b) &&
               helm::common_prefix(known.first, prefix) == end;
      });
      if (longer == all_.end()) {
        all_[prefix] = {blocks[b], now};
      } else {
        longer->second.used = now;
        if (static_cast<int64_t>(longer->first.size()) > end) continue;
        HeldBlock& held = longer->second.held;
        if (blocks[b].window_begin < held.window_begin) held = blocks[b];
      }
    }
  }

  // The leaf used least recently, if before `now`.
  std::vector<HeldBlock> drop(int64_t now) {
    auto oldest = all_.end();
    for (auto it = all_.begin(); it != all_.end(); ++it) {
      const auto next = std::next(it);  // in order, what begins with a prefix follows it
      const auto size = static_cast<int64_t>(it->first.size());
      const bool leaf = next == all_.end() || helm::common_prefix(next->first, it->first) < size;
      if (!leaf || it->second.used >= now) continue;
      if (oldest == all_.end() || it->second.used < oldest->second.used) oldest = it;
    }
    if (oldest == all_.end()) return {};
    const HeldBlock held = oldest->second.held;
    all_.erase(oldest);
    return {held};
  }

  std::multiset<int32_t> blocks() const {
    std::multiset<int32_t> blocks;
    for (const auto& [prefix, one] : all_) blocks.insert(one.held.block);
    return blocks;
  }

 private:
  struct One {
    HeldBlock held;
    int64_t used = 0;
  };
  std::map<Ids, One> all_;
};

}  // namespace

TEST_CASE("a tree of blocks finds and gives up what a list of all prefixes does") {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random() % static_cast<uint32_t>(n));
    };
    PrefixTree tree(kPage);
    Naive naive;
    std::map<int32_t, Ids> content;  // of blocks that are there: all tokens up to their end
    int32_t next_block = 0;
    int64_t now = 0;
    const auto gone = [&](const std::vector<HeldBlock>& blocks) {
      for (const HeldBlock& held : blocks) REQUIRE(content.erase(held.block) == 1);
    };
    const auto some_tokens = [&] {  // of few kinds, so that many begin alike
      Ids tokens;
      const int64_t length = 1 + below(20);
      const int64_t kinds = 1 + below(3);
      while (std::ssize(tokens) < length) tokens.push_back(static_cast<int32_t>(below(kinds)));
      return tokens;
    };
    for (int action = 0; action < 80; ++action) {
      const Ids tokens = some_tokens();
      const int64_t kind = below(8);
      if (kind < 3) {
        std::vector<HeldBlock> blocks;
        for (int64_t begin = 0; begin < std::ssize(tokens); begin += kPage) {
          const int64_t end = std::min(begin + kPage, std::ssize(tokens));
          content[next_block] = Ids(tokens.begin(), tokens.begin() + end);
          blocks.push_back({next_block++, below(3) == 0 ? HeldBlock::kGone : below(2)});
        }
        naive.insert(tokens, blocks, ++now);
        gone(tree.insert(tokens, blocks));
      } else if (kind < 6) {
        const PrefixTree::Path path = tree.find(tokens);
        REQUIRE(path.shared == naive.find(tokens));
        const std::vector<HeldBlock> blocks = path.blocks();
        REQUIRE(std::ssize(blocks) == (path.shared + kPage - 1) / kPage);
        for (size_t b = 0; b < blocks.size(); ++b) {
          const int64_t end = std::min(path.shared, static_cast<int64_t>(b + 1) * kPage);
          REQUIRE(helm::common_prefix(content.at(blocks[b].block), tokens) >= end);
        }
        naive.touch(blocks, ++now);
        tree.touch(path);
        if (path.whole() && below(30) == 0) {  // it goes on in the last block
          std::vector<HeldBlock> taken = blocks;
          gone({taken.back()});
          taken.back().block = -1;
          tree.update(path, taken);
          break;  // the list knows no such thing; what is left is checked below
        }
      } else {
        const int64_t before = kind == 6 ? now : ++now;
        if (kind == 7) tree.tick();
        const std::vector<HeldBlock> dropped = tree.drop_oldest();
        REQUIRE(dropped == naive.drop(before));
        gone(dropped);
      }
      std::multiset<int32_t> there;
      for (const auto& [block, prefix] : content) there.insert(block);
      REQUIRE(naive.blocks() == there);
    }
    tree.tick();
    REQUIRE(std::ssize(tree.others()) == std::ssize(content));
    while (true) {
      const std::vector<HeldBlock> dropped = tree.drop_oldest();
      if (dropped.empty()) break;
      gone(dropped);
    }
    REQUIRE(content.empty());
    REQUIRE(tree.leaves() == 0);
  }
}

TEST_CASE("what was used at the last touch stays, what others have in common is there once") {
  PrefixTree tree(kPage);
  CHECK(tree.insert(Ids{1, 2, 3, 4, 5, 6}, std::vector<HeldBlock>{{0}, {1}}).empty());
  CHECK(tree.insert(Ids{1, 2, 3, 4, 7}, std::vector<HeldBlock>{{2}, {3}}) ==
        std::vector<HeldBlock>{{2}});
  CHECK(tree.leaves() == 2);
  const PrefixTree::Path path = tree.find(Ids{1, 2, 3, 4, 5, 9});
  CHECK(path.shared == 5);
  CHECK(!path.whole());
  tree.touch(path);
  CHECK(tree.others() == std::vector<HeldBlock>{{3}});
  CHECK(tree.drop_oldest() == std::vector<HeldBlock>{{3}});
  CHECK(tree.drop_oldest().empty());
  tree.tick();
  CHECK(tree.drop_oldest() == std::vector<HeldBlock>{{1}});
  CHECK(tree.drop_oldest() == std::vector<HeldBlock>{{0}});
}
