// Guesses from what a text repeats of itself. Knows no model.
#pragma once

#include <unordered_map>

#include "helm/speculation.h"

namespace helm {

class NgramDrafter final : public Drafter {
 public:
  static constexpr int64_t kLeast = 2;     // tokens that must recur
  static constexpr int64_t kLongest = 32;  // longer runs are as good
  static constexpr int kTried = 64;        // places that are compared, the latest first

  Draft propose(int64_t request, std::span<const int32_t> tokens, int64_t most) override;
  void forget(int64_t request) override { texts_.erase(request); }
  double expected(int32_t kind) const override;

  // Of a run of so many tokens.
  static int32_t kind_of(int64_t length);

 private:
  // Where each pair of tokens has stood: the place behind it. The pair at the end is not in it.
  struct Text {
    std::unordered_map<uint64_t, int32_t> latest;
    std::vector<int32_t> before;  // [place] the one before of the same pair, or -1
  };

  std::unordered_map<int64_t, Text> texts_;
};

}  // namespace helm
