// Who begins next and who gives way. Pure: knows classes, keys, counts of tokens and the seconds
// that it is told; no requests' contents, no blocks, no clock.
//
// A request's rank is its class, and one more for every kAgeing_s that nobody of its class and key
// has begun while it waited. So a class is not passed over without end, and a key with many
// requests does not age faster than one with a few. What has begun keeps its rank and its place:
// parked, it goes before all others of its rank. Between keys the one that was given fewest tokens
// goes first (virtual token counters, Sheng et al. 2024).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <tuple>

#include "helm/generation.h"

namespace helm {

// Of a request, as far as its turn is concerned.
struct Place {
  RequestId id = -1;
  int32_t priority = Request::kNormal;
  int64_t key = 0;
  double since_s = 0;  // it came, or was parked
  int64_t rank = -1;   // with which it began; -1: it has not
};

class Ranking {
 public:
  static constexpr double kAgeing_s = 30;
  static constexpr int64_t kOutputWeight = 2;  // of a token drawn, beside one of a prompt

  // Requests by id; a key that was away has no more to its credit than those that are there.
  void come(const Place& place);
  void leave(const Place& place);
  // The request begins, or begins again: its rank is set.
  void begin(Place& place, double now_s);
  // It was computed so many tokens, weighted.
  void charge(int64_t key, int64_t tokens);

  // Of those that wait, the least begins next.
  using Turn = std::tuple<int64_t, bool, int64_t, RequestId>;
  Turn turn(const Place& place, double now_s) const;
  // Whether `a`, which has begun, gives way to `b`, which has too.
  static bool yields(const Place& a, const Place& b) {
    return std::tuple(-a.rank, a.id) > std::tuple(-b.rank, b.id);
  }
  int64_t keys() const { return static_cast<int64_t>(keys_.size()); }

 private:
  struct Key {
    int64_t open = 0;                                       // requests
    int64_t served = 0;                                     // weighted tokens
    std::array<double, Request::kPriorities> begun_s = {};  // the last of each class
  };
  static constexpr size_t kMostKeys = 4096;  // that are known

  int64_t rank(const Place& place, double now_s) const;

  std::map<int64_t, Key> keys_;
};

}  // namespace helm
