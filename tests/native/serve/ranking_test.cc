// Who begins next: classes, ageing, keys that take turns by tokens, and what gives way.
#include "serve/ranking.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <vector>

namespace {

using helm::Place;
using helm::Ranking;
using helm::Request;

// Requests wait, and the first begins, over and over; all have come at 0 s.
struct Line {
  Ranking ranking;
  std::vector<Place> waiting;

  void come(const Place& place) {
    ranking.come(place);
    waiting.push_back(place);
  }
  Place begin(double now_s) {
    const auto first =
        std::min_element(waiting.begin(), waiting.end(), [&](const Place& a, const Place& b) {
          return ranking.turn(a, now_s) < ranking.turn(b, now_s);
        });
    Place place = *first;
    waiting.erase(first);
    ranking.begin(place, now_s);
    return place;
  }
};

}  // namespace

TEST_CASE("higher classes begin first, and within one those that came first") {
  Line line;
  for (int64_t id = 0; id < 6; ++id) line.come({id, static_cast<int32_t>(id % 3), 0, 0});
  std::vector<int64_t> order;
  while (!line.waiting.empty()) order.push_back(line.begin(1).id);
  CHECK(order == std::vector<int64_t>{2, 5, 1, 4, 0, 3});
}

TEST_CASE("a class that is passed over rises, by one request at a time") {
  Line line;
  for (int64_t id = 0; id < 3; ++id) line.come({id, Request::kBatch, 0, 0});
  int64_t next = 10;
  std::vector<double> batch_s;
  for (double now_s = 1; batch_s.size() < 3; now_s += 1) {
    REQUIRE(now_s < 500);
    line.come({next++, Request::kInteractive, 0, now_s});
    if (line.begin(now_s).priority == Request::kBatch) batch_s.push_back(now_s);
  }
  // The other waits a second at most, so one of batch is next after two classes' ageing.
  CHECK(batch_s == std::vector<double>{60, 120, 180});
}

TEST_CASE("keys take turns by tokens, however many requests one has and however long they wait") {
  Line line;
  std::map<int64_t, int64_t> tokens, begun;
  int64_t id = 0;
  for (; id < 200; ++id) line.come({id, Request::kNormal, 7, 0});
  for (double now_s = 100; now_s < 200; ++now_s) {
    line.come({id++, Request::kNormal, 8, now_s - 2});
    const Place place = line.begin(now_s);
    const int64_t cost = place.key == 7 ? 300 : 100;
    line.ranking.charge(place.key, cost);
    tokens[place.key] += cost;
    ++begun[place.key];
  }
  CHECK(begun[7] + begun[8] == 100);
  CHECK(std::abs(tokens[7] - tokens[8]) <= 300);
}

TEST_CASE("a key that was away has nothing to its credit") {
  Line line;
  line.come({0, Request::kNormal, 1, 0});
  line.ranking.charge(1, 5000);
  line.come({1, Request::kNormal, 2, 0});
  CHECK(line.begin(1).id == 0);  // both stand at 5000: by arrival
  line.ranking.charge(2, 1);
  line.come({2, Request::kNormal, 1, 0});
  CHECK(line.begin(1).id == 2);
}

TEST_CASE("what was parked goes before all of its rank, and gives way last if it is older") {
  Line line;
  Place old{0, Request::kNormal, 1, 0}, young{1, Request::kNormal, 2, 0};
  for (const Place& place : {old, young}) line.ranking.come(place);
  line.ranking.begin(old, 1);
  line.ranking.begin(young, 1);
  CHECK(Ranking::yields(young, old));
  CHECK(!Ranking::yields(old, young));
  line.ranking.charge(2, 9000);
  young.since_s = 2;
  line.waiting.push_back(young);
  line.come({2, Request::kNormal, 3, 0});
  line.come({3, Request::kInteractive, 3, 0});
  CHECK(line.begin(3).id == 3);
  CHECK(line.begin(3).id == 1);
  // One that was admitted because it had waited long keeps that rank.
  Place batch{4, Request::kBatch, 4, 0}, later{5, Request::kInteractive, 5, 100};
  line.ranking.come(batch);
  line.ranking.begin(batch, 95);
  line.ranking.come(later);
  line.ranking.begin(later, 101);
  CHECK(Ranking::yields(later, batch));
}

TEST_CASE("what is known of keys that are gone is bounded") {
  Ranking ranking;
  ranking.come({0, Request::kNormal, 0, 0});
  for (int64_t id = 1; id < 6000; ++id) {
    const Place place{id, Request::kNormal, id, 0};
    ranking.come(place);
    ranking.leave(place);
    REQUIRE(ranking.keys() <= 4097);
  }
}
