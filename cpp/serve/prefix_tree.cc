#include "serve/prefix_tree.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "helm/prefix_cache.h"

namespace helm {
namespace {

bool begins_with(std::span<const int32_t> tokens, std::span<const int32_t> prefix) {
  return common_prefix(tokens, prefix) == std::ssize(prefix);
}

}  // namespace

bool PrefixTree::Before::operator()(Tokens a, Tokens b) const {
  return std::ranges::lexicographical_compare(a, b);
}

// From the leaves: a long prefix is no deep recursion.
PrefixTree::~PrefixTree() {
  while (!leaves_.empty()) erase(*leaves_.begin()->second);
}

std::vector<HeldBlock> PrefixTree::Path::blocks() const {
  std::vector<HeldBlock> blocks;
  for (const Node* node : nodes) blocks.push_back(node->held);
  return blocks;
}

bool PrefixTree::Path::whole() const {
  if (nodes.empty() || !nodes.back()->children.empty()) return false;
  int64_t tokens = 0;
  for (const Node* node : nodes) tokens += std::ssize(node->tokens);
  return tokens == shared;
}

// The children next to a block's tokens in order share most with it.
PrefixTree::Path PrefixTree::find(std::span<const int32_t> tokens) const {
  Path path;
  const Node* node = &root_;
  while (true) {
    const auto rest = tokens.subspan(static_cast<size_t>(path.shared));
    const auto page = rest.first(std::min(rest.size(), static_cast<size_t>(page_tokens_)));
    Node* best = nullptr;
    int64_t most = 0;
    const auto look = [&](Node& child) {
      const int64_t shared = common_prefix(child.tokens, page);
      if (shared > most || (shared == most && best != nullptr && child.used > best->used)) {
        best = &child;
        most = shared;
      }
    };
    const auto next = node->children.lower_bound(page);
    if (next != node->children.end()) look(*next->second);
    if (next != node->children.begin()) look(*std::prev(next)->second);
    if (best == nullptr) return path;
    path.nodes.push_back(best);
    path.shared += most;
    if (most < page_tokens_) return path;
    node = best;
  }
}

void PrefixTree::use(Node& node) {
  const bool leaf = node.children.empty();
  if (leaf) leaves_.erase(node.used);
  node.used = clock_;
  if (leaf) leaves_[clock_] = &node;
}

void PrefixTree::touch(const Path& path) {
  ++clock_;
  for (Node* node : path.nodes) use(*node);
}

std::vector<HeldBlock> PrefixTree::insert(std::span<const int32_t> tokens,
                                          std::span<const HeldBlock> blocks) {
  std::vector<HeldBlock> surplus;
  Node* node = &root_;
  ++clock_;
  for (HeldBlock held : blocks) {
    const auto page = tokens.first(std::min(tokens.size(), static_cast<size_t>(page_tokens_)));
    tokens = tokens.subspan(page.size());
    auto& children = node->children;
    auto next = children.lower_bound(page);
    if (next == children.end() || !begins_with(next->second->tokens, page)) {
      if (next != children.begin() && begins_with(page, std::prev(next)->second->tokens)) {
        Node& shorter = *std::prev(next)->second;
        surplus.push_back(shorter.held);
        leaves_.erase(shorter.used);
        children.erase(std::prev(next));
      }
      if (children.empty() && node != &root_) leaves_.erase(node->used);
      auto added =
          std::make_unique<Node>(Node{{page.begin(), page.end()}, std::exchange(held, {}), node});
      const Tokens key = added->tokens;
      next = children.emplace(key, std::move(added)).first;
    }
    node = next->second.get();
    if (held.block >= 0) {
      // Where one of them lacks what windows show, the other is kept.
      const bool alike = node->tokens.size() == page.size();
      if (alike && held.window_begin < node->held.window_begin) std::swap(held, node->held);
      surplus.push_back(held);
    }
    use(*node);
  }
  return surplus;
}

void PrefixTree::update(const Path& path, std::span<const HeldBlock> blocks) {
  for (size_t i = 0; i < path.nodes.size(); ++i) path.nodes[i]->held = blocks[i];
  if (!path.nodes.empty() && blocks.back().block < 0) erase(*path.nodes.back());
}

void PrefixTree::erase(Node& leaf) {
  Node& parent = *leaf.parent;
  leaves_.erase(leaf.used);
  parent.children.erase(parent.children.find(leaf.tokens));
  if (parent.children.empty() && &parent != &root_) leaves_[parent.used] = &parent;
}

std::vector<HeldBlock> PrefixTree::drop_oldest() {
  if (leaves_.empty() || leaves_.begin()->first == clock_) return {};
  return drop({{leaves_.begin()->second}});
}

PrefixTree::Path PrefixTree::oldest(const std::function<bool(const Path&)>& fits) const {
  for (const auto& [used, leaf] : leaves_) {
    Path path;
    for (Node* node = leaf; node != &root_; node = node->parent) {
      path.nodes.push_back(node);
      path.shared += std::ssize(node->tokens);
    }
    std::ranges::reverse(path.nodes);
    if (fits(path)) return path;
  }
  return {};
}

std::vector<HeldBlock> PrefixTree::drop(const Path& path) {
  const HeldBlock held = path.nodes.back()->held;
  erase(*path.nodes.back());
  return {held};
}

std::vector<HeldBlock> PrefixTree::others() const {
  std::vector<HeldBlock> others;
  std::vector<const Node*> open{&root_};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& [tokens, child] : node->children) {
      if (child->used < clock_) others.push_back(child->held);
      open.push_back(child.get());
    }
  }
  return others;
}

}  // namespace helm
