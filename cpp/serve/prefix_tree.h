// Prefixes as a tree of blocks: a node has the tokens of one block and what holds their KV, its
// children what came next. What prefixes have in common is there once. Knows no engine.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "helm/held_block.h"

namespace helm {

class PrefixTree {
  using Tokens = std::span<const int32_t>;
  struct Before {
    bool operator()(Tokens a, Tokens b) const;
  };

 public:
  // All but leaves are full; no block begins with all tokens of another behind the same one.
  struct Node {
    std::vector<int32_t> tokens;
    HeldBlock held;
    Node* parent = nullptr;                                         // the root's is null
    std::map<Tokens, std::unique_ptr<Node>, Before> children = {};  // by their tokens
    int64_t used = 0;                                               // when last, by the clock
  };
  // Nodes one behind the other, from the first, and how many leading tokens they have in common
  // with what was looked for: all but the last one all of theirs.
  struct Path {
    std::vector<Node*> nodes;
    int64_t shared = 0;

    std::vector<HeldBlock> blocks() const;
    // Whether the last one is a leaf and has no other tokens.
    bool whole() const;
  };

  explicit PrefixTree(int64_t page_tokens) : page_tokens_(page_tokens) {}
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest beginning of `tokens`.
  Path find(std::span<const int32_t> tokens) const;
  // Its nodes were used now.
  void touch(const Path& path);
  // `tokens` lie in these blocks. What the tree has already, or replaces, is returned.
  [[nodiscard]] std::vector<HeldBlock> insert(std::span<const int32_t> tokens,
                                              std::span<const HeldBlock> blocks);
  // What became of the path's blocks. The last one may be gone, if it is a leaf.
  void update(const Path& path, std::span<const HeldBlock> blocks);
  // Gives up the leaf used least recently, unless that was the last touch(); its block, or none.
  [[nodiscard]] std::vector<HeldBlock> drop_oldest();
  // The leaf used least recently whose path fits, with that path; no nodes: none does.
  Path oldest(const std::function<bool(const Path&)>& fits) const;
  // Gives up the leaf at the path's end; its block.
  [[nodiscard]] std::vector<HeldBlock> drop(const Path& path);
  // All blocks but those used at the last touch().
  std::vector<HeldBlock> others() const;
  // Without children: prefixes that none other begins with.
  int64_t leaves() const { return static_cast<int64_t>(leaves_.size()); }
  // Nothing is used now: all may be given up.
  void tick() { ++clock_; }

 private:
  void use(Node& node);
  void erase(Node& leaf);

  int64_t page_tokens_;
  Node root_;
  // By the time of their last use, at which no other leaf was used: one path was.
  std::map<int64_t, Node*> leaves_;
  int64_t clock_ = 0;
};

}  // namespace helm
