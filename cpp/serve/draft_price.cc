#include "serve/draft_price.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <queue>

namespace helm {
namespace {

constexpr double kLatest = 0.2;  // weight of the last step
constexpr double kStay = 1.01, kBegin = 1.04;
constexpr double kMostRate = 0.99;
constexpr int64_t kTrusted = 3;  // measured so often, a price is no accident

}  // namespace

void StepPrice::note(int64_t rows, double seconds) {
  if (rows < 1 || !(seconds > 0)) return;
  Measured& m = measured_[rows];
  // Of few steps the shortest tells most: other programs only ever make one longer.
  if (m.count < kTrusted) {
    m.seconds = m.count == 0 ? seconds : std::min(m.seconds, seconds);
  } else {
    m.seconds += kLatest * (std::min(seconds, kMostOutlier * m.seconds) - m.seconds);
  }
  ++m.count;
  m.step = ++step_;
}

double StepPrice::guess(int64_t rows, double shorter_s, int64_t shorter) const {
  return shorter_s * std::max(1 + kRowShare * static_cast<double>(rows - shorter), 0.1);
}

double StepPrice::seconds(int64_t rows) const {
  if (measured_.empty()) return 0;
  const auto first = measured_.begin();
  if (rows <= first->first) {
    return guess(rows, first->second.seconds, first->first);
  }
  // From the fewest rows on, each with what is left of it.
  int64_t at = first->first;
  double there_s = first->second.seconds;
  for (auto it = std::next(first); it != measured_.end(); ++it) {
    const Measured& m = it->second;
    const double known = static_cast<double>(std::min(m.count, kTrusted)) / kTrusted;
    const double left = known * std::exp2(-static_cast<double>(step_ - m.step) / kHalfLife);
    const double guessed_s = guess(it->first, there_s, at);
    const double here_s = std::max(left * m.seconds + (1 - left) * guessed_s, there_s);
    if (rows <= it->first) {
      const double share = static_cast<double>(rows - at) / static_cast<double>(it->first - at);
      return there_s + share * (here_s - there_s);
    }
    at = it->first;
    there_s = here_s;
  }
  return guess(rows, there_s, at);
}

Acceptance::Acceptance(const Drafter* drafter) {
  for (int32_t kind = 0; kind < Drafter::kKinds; ++kind) {
    kinds_[static_cast<size_t>(kind)].expected =
        drafter == nullptr ? 0 : std::clamp(drafter->expected(kind), 0.0, 1.0);
  }
}

Acceptance::Acceptance(const Acceptance& others, double weight) : Acceptance(others) {
  for (Kind& kind : kinds_) {
    const double tried = kind.tried;
    if (tried <= weight) continue;
    kind.tried = weight;
    kind.right *= weight / tried;
  }
}

double Acceptance::rate(int32_t kind) const {
  const Kind& k = kinds_[static_cast<size_t>(kind)];
  return std::min((k.right + kWeight * k.expected) / (k.tried + kWeight), kMostRate);
}

// Each guess was tried but those behind the first wrong one.
void Acceptance::note(int32_t kind, int64_t drafted, int64_t accepted) {
  Kind& k = kinds_[static_cast<size_t>(kind)];
  k.tried = kKept * k.tried + static_cast<double>(std::min(accepted + 1, drafted));
  k.right = kKept * k.right + static_cast<double>(accepted);
}

void Acceptance::skip(int32_t kind) {
  Kind& k = kinds_[static_cast<size_t>(kind)];
  k.tried *= kFaded;
  k.right *= kFaded;
}

double expected_tokens(double rate, int64_t guesses) {
  double tokens = 1, all_right = 1;
  for (int64_t i = 0; i < guesses; ++i) tokens += all_right *= rate;
  return tokens;
}

std::vector<int64_t> guesses_that_pay(const StepPrice& price, int64_t rows,
                                      std::span<const DraftOffer> offers, int64_t spare,
                                      bool guessing, const DraftSeconds& draft_s) {
  std::vector<int64_t> guesses(offers.size(), 0), best = guesses;
  const double alone_s = price.seconds(rows);
  if (!(alone_s > 0)) return best;
  // The likeliest guess of all comes next: any number of guesses brings most so.
  using Next = std::pair<double, size_t>;
  std::priority_queue<Next> next;
  for (size_t i = 0; i < offers.size(); ++i) {
    if (offers[i].most > 0) next.emplace(offers[i].rate, i);
  }
  double tokens = static_cast<double>(offers.size());
  double most = tokens / alone_s * (guessing ? kStay : kBegin);
  for (int64_t added = 1; added <= spare && !next.empty(); ++added) {
    const auto [likely, i] = next.top();
    next.pop();
    tokens += likely;
    if (++guesses[i] < offers[i].most) next.emplace(likely * offers[i].rate, i);
    const double drafting_s = draft_s ? draft_s(guesses) : 0;
    const double rate = tokens / (price.seconds(rows + added) + drafting_s);
    if (rate > most) most = rate, best = guesses;
  }
  return best;
}

}  // namespace helm
