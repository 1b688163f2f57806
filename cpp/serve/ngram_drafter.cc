#include "serve/ngram_drafter.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace helm {
namespace {

constexpr std::array<int64_t, Drafter::kKinds> kLengths = {2, 3, 4, 6, 9, 16};  // from which on
constexpr std::array<double, Drafter::kKinds> kExpected = {0.25, 0.4, 0.55, 0.7, 0.8, 0.9};

uint64_t pair_before(std::span<const int32_t> tokens, int64_t place) {
  const auto at = static_cast<size_t>(place);
  return uint64_t{static_cast<uint32_t>(tokens[at - 2])} << 32 |
         static_cast<uint32_t>(tokens[at - 1]);
}

// How many tokens before `place` are those at the end, from the last one on.
int64_t shared_before(std::span<const int32_t> tokens, int64_t place, int64_t most) {
  const auto end = std::ssize(tokens);
  int64_t length = 0;
  while (length < std::min(most, place) && tokens[static_cast<size_t>(place - 1 - length)] ==
                                               tokens[static_cast<size_t>(end - 1 - length)]) {
    ++length;
  }
  return length;
}

}  // namespace

int32_t NgramDrafter::kind_of(int64_t length) {
  const auto above = std::upper_bound(kLengths.begin(), kLengths.end(), length);
  return static_cast<int32_t>(std::max<std::ptrdiff_t>(above - kLengths.begin() - 1, 0));
}

double NgramDrafter::expected(int32_t kind) const {
  return kExpected[static_cast<size_t>(kind)];
}

Draft NgramDrafter::propose(int64_t request, std::span<const int32_t> tokens, int64_t most) {
  const auto end = std::ssize(tokens);
  if (end <= kLeast || most < 1) return {};
  Text& text = texts_[request];
  text.before.reserve(tokens.size());
  for (int64_t place = std::ssize(text.before); place < end; ++place) {
    int32_t before = -1;
    if (place >= kLeast) {
      const auto [found, added] =
          text.latest.try_emplace(pair_before(tokens, place), static_cast<int32_t>(place));
      if (!added) before = std::exchange(found->second, static_cast<int32_t>(place));
    }
    text.before.push_back(before);
  }
  const auto found = text.latest.find(pair_before(tokens, end));
  if (found == text.latest.end()) return {};
  int64_t best = 0, longest = 0;
  int32_t place = found->second;
  for (int tried = 0; place >= 0 && tried < kTried && longest < kLongest; ++tried) {
    const int64_t length = shared_before(tokens, place, kLongest);
    if (length > longest) best = place, longest = length;
    place = text.before[static_cast<size_t>(place)];
  }
  Draft draft;
  draft.kind = kind_of(longest);
  for (int64_t i = 0; i < most; ++i) {  // beyond the end it repeats itself
    const int64_t from = best + i;
    draft.tokens.push_back(from < end ? tokens[static_cast<size_t>(from)]
                                      : draft.tokens[static_cast<size_t>(from - end)]);
  }
  return draft;
}

std::shared_ptr<Drafter> ngram_drafter() {
  return std::make_shared<NgramDrafter>();
}

}  // namespace helm
