#include "serve/ranking.h"

#include <algorithm>
#include <limits>

namespace helm {

void Ranking::come(const Place& place) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t least = kNone;
  for (const auto& [key, other] : keys_) {
    if (other.open > 0) least = std::min(least, other.served);
  }
  // With nobody there all begin anew; of those that left, no more are known than kMostKeys.
  if (least == kNone) keys_.clear();
  if (keys_.size() >= kMostKeys) {
    std::erase_if(keys_, [](const auto& entry) { return entry.second.open == 0; });
  }
  Key& own = keys_[place.key];
  if (own.open++ == 0 && least != kNone) own.served = std::max(own.served, least);
}

void Ranking::leave(const Place& place) {
  --keys_.at(place.key).open;
}

void Ranking::charge(int64_t key, int64_t tokens) {
  keys_.at(key).served += tokens;
}

int64_t Ranking::rank(const Place& place, double now_s) const {
  double since_s = place.since_s;
  int64_t from = place.rank;
  if (from < 0) {
    const double begun_s = keys_.at(place.key).begun_s[static_cast<size_t>(place.priority)];
    since_s = std::max(since_s, begun_s);
    from = place.priority;
  }
  return from + static_cast<int64_t>(std::max(0.0, now_s - since_s) / kAgeing_s);
}

void Ranking::begin(Place& place, double now_s) {
  const bool first = place.rank < 0;
  place.rank = rank(place, now_s);
  if (first) keys_.at(place.key).begun_s[static_cast<size_t>(place.priority)] = now_s;
}

Ranking::Turn Ranking::turn(const Place& place, double now_s) const {
  return {-rank(place, now_s), place.rank < 0, keys_.at(place.key).served, place.id};
}

}  // namespace helm
