// What is guessed, against a naive search; what guesses cost and bring, against sums by hand.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "serve/draft_price.h"
#include "serve/ngram_drafter.h"

namespace {

using helm::Acceptance;
using helm::Draft;
using helm::Drafter;
using helm::DraftOffer;
using helm::guesses_that_pay;
using helm::NgramDrafter;
using helm::StepPrice;

// The longest run before some place that the end repeats, the latest such place; -1: none.
std::pair<int64_t, int64_t> naive_match(const std::vector<int32_t>& text) {
  const auto size = std::ssize(text);
  int64_t best = -1, longest = NgramDrafter::kLeast - 1;
  for (int64_t place = size - 1; place > 0; --place) {
    int64_t length = 0;
    while (length < place && length < NgramDrafter::kLongest &&
           text[static_cast<size_t>(place - 1 - length)] ==
               text[static_cast<size_t>(size - 1 - length)]) {
      ++length;
    }
    if (length > longest) best = place, longest = length;
  }
  return {best, longest};
}

}  // namespace

TEST_CASE("an n-gram drafter finds the longest match, the latest of several, as the text grows") {
  std::mt19937 random(3);
  for (const int32_t alphabet : {2, 3, 7, 40}) {
    CAPTURE(alphabet);
    NgramDrafter drafter;
    std::vector<int32_t> text;
    int64_t found = 0;
    for (int step = 0; step < 60; ++step) {
      for (uint32_t added = random() % 3; added-- > 0;) {
        text.push_back(static_cast<int32_t>(random()) & 0xffff);
        text.back() %= alphabet;
      }
      const auto [place, length] = naive_match(text);
      // Of many places only the latest are looked at.
      if (alphabet < 7 && step > 30) break;
      const Draft draft = drafter.propose(5, text, 9);
      REQUIRE(draft.tokens.size() == (place < 0 ? 0 : 9));
      if (place < 0) continue;
      ++found;
      CHECK(draft.kind == NgramDrafter::kind_of(length));
      std::vector<int32_t> whole = text;
      for (int64_t i = 0; i < 9; ++i) whole.push_back(whole[static_cast<size_t>(place + i)]);
      CHECK(std::equal(draft.tokens.begin(), draft.tokens.end(), whole.begin() + std::ssize(text)));
    }
    CHECK(found > 0);
  }
}

TEST_CASE("an n-gram drafter keeps texts apart and forgets them") {
  NgramDrafter drafter;
  const std::vector<int32_t> repeats = {1, 2, 3, 1, 2}, other = {4, 5, 1, 2};
  CHECK(drafter.propose(1, repeats, 3).tokens == std::vector<int32_t>{3, 1, 2});
  CHECK(drafter.propose(2, other, 3).tokens.empty());
  CHECK(drafter.propose(1, repeats, 0).tokens.empty());
  drafter.forget(1);
  CHECK(drafter.propose(1, std::vector<int32_t>{9, 9}, 3).tokens.empty());
  CHECK(drafter.propose(1, std::vector<int32_t>{9, 9, 9}, 3).tokens ==
        std::vector<int32_t>{9, 9, 9});
  CHECK(drafter.propose(3, std::vector<int32_t>{}, 3).tokens.empty());
  for (int32_t kind = 0; kind < Drafter::kKinds; ++kind) {
    CHECK(drafter.expected(kind) > 0);
    CHECK(drafter.expected(kind) < 1);
    CHECK((kind == 0 || drafter.expected(kind) > drafter.expected(kind - 1)));
  }
  CHECK(NgramDrafter::kind_of(2) == 0);
  CHECK(NgramDrafter::kind_of(1000) == Drafter::kKinds - 1);
}

TEST_CASE("a step's price follows what was measured, in lines between, and fades") {
  StepPrice price;
  CHECK(price.seconds(4) == 0);
  for (int i = 0; i < 5; ++i) price.note(1, 1.0);
  CHECK(price.seconds(1) == doctest::Approx(1.0));
  CHECK(price.seconds(3) == doctest::Approx(1 + 2 * StepPrice::kRowShare));
  for (int i = 0; i < 5; ++i) price.note(5, 3.0);
  CHECK(price.seconds(5) == doctest::Approx(3.0).epsilon(0.05));
  CHECK(price.seconds(3) == doctest::Approx(2.0).epsilon(0.05));
  CHECK(price.seconds(9) > price.seconds(5));
  price.note(1, 50.0);  // something else was at work
  CHECK(price.seconds(1) < 1.2);
  for (int i = 0; i < 5000; ++i) price.note(1, 1.0);
  CHECK(price.seconds(5) < 1.3);  // worth another trial
  price.note(1, 0);
  price.note(0, 1);
  price.note(1, NAN);
  CHECK(price.seconds(1) == doctest::Approx(1.0));
}

TEST_CASE(
    "a first step that takes long is not believed, nor is one that is shorter than fewer rows") {
  StepPrice price;
  price.note(1, 1.0);
  price.note(5, 9.0);
  CHECK(price.seconds(5) < 6);
  for (int i = 0; i < 3; ++i) price.note(5, 0.5);
  CHECK(price.seconds(5) >= 1.0);
}

TEST_CASE("acceptance is learnt by kind and forgotten") {
  NgramDrafter drafter;
  Acceptance rates(&drafter);
  CHECK(rates.rate(2) == doctest::Approx(drafter.expected(2)));
  for (int i = 0; i < 40; ++i) rates.note(2, 4, 4);
  CHECK(rates.rate(2) > 0.95);
  CHECK(rates.rate(1) == doctest::Approx(drafter.expected(1)));
  for (int i = 0; i < 40; ++i) rates.note(2, 4, 0);
  CHECK(rates.rate(2) < 0.2);
  const Acceptance own(rates, 2);
  CHECK(own.rate(2) > rates.rate(2));
  CHECK(own.rate(2) < drafter.expected(2));
  for (int i = 0; i < 2000; ++i) rates.skip(2);
  CHECK(rates.rate(2) == doctest::Approx(drafter.expected(2)).epsilon(0.01));
}

TEST_CASE("as many guesses as make the most tokens per second, of all ways to share them") {
  std::mt19937 random(11);
  std::uniform_real_distribution<double> share(0, 1);
  for (int trial = 0; trial < 300; ++trial) {
    CAPTURE(trial);
    StepPrice price;
    const auto rows = static_cast<int64_t>(1 + random() % 3);
    double seconds = 1;
    for (int64_t r = rows; r < rows + 8; ++r) {
      for (int i = 0; i < 3; ++i) price.note(r, seconds);
      seconds += 0.6 * share(random) * share(random);
    }
    std::vector<DraftOffer> offers;
    for (int64_t i = 0; i < rows; ++i) {
      offers.push_back({share(random), static_cast<int64_t>(random() % 5)});
    }
    const int64_t spare = 6;
    // The best of all ways, by hand.
    double best = 0;
    std::vector<int64_t> counts(offers.size(), 0);
    const auto value = [&] {
      double tokens = 0;
      int64_t added = 0;
      for (size_t i = 0; i < offers.size(); ++i) {
        for (int64_t k = 0; k <= counts[i]; ++k) {
          tokens += std::pow(offers[i].rate, static_cast<double>(k));
        }
        added += counts[i];
      }
      return added > spare ? 0 : tokens / price.seconds(rows + added);
    };
    const double alone = value();
    while (true) {
      best = std::max(best, value());
      size_t i = 0;
      while (i < counts.size() && counts[i] == offers[i].most) counts[i++] = 0;
      if (i == counts.size()) break;
      ++counts[i];
    }
    for (const bool guessing : {false, true}) {
      counts = guesses_that_pay(price, rows, offers, spare, guessing);
      const double found = value();
      const bool any = std::any_of(counts.begin(), counts.end(), [](int64_t k) { return k > 0; });
      CHECK(found > 0);
      if (any) {
        CHECK(found == doctest::Approx(best));
        CHECK(found > alone);
      } else {
        CHECK(best <= alone * 1.05);
      }
    }
  }
  CHECK(guesses_that_pay(StepPrice{}, 1, std::vector<DraftOffer>{{0.9, 4}}, 4, true) ==
        std::vector<int64_t>{0});
}
