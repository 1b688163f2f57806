#include "serve/speculator.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "base/check.h"

namespace helm {
namespace {

constexpr double kOthers = 4;  // guesses of other requests that count for a new one
constexpr int64_t kMost = 32;  // guesses of a request in a step
constexpr int64_t kFirst = 2;  // likewise, while it is not known what they take

}  // namespace

Speculator::Speculator(const Plan& plan, Speculation speculation)
    : speculation_(std::move(speculation)),
      vocab_size_(plan.vocab_size),
      step_tokens_(plan.limits.step_tokens),
      step_outputs_(plan.limits.step_outputs),
      all_(speculation_.drafter.get()) {
  if (speculation_.tokens < 0) {
    fail(ErrorKind::kInvalid, "[speculate] ", speculation_.tokens,
         " guesses per step were asked for; expected 1 or more, or 0 for as many as pay");
  }
  const std::string obstacle = speculation_obstacle(plan);
  if (on() && !obstacle.empty()) {
    fail(ErrorKind::kInvalid, "[speculate] this plan cannot compute guesses: ", obstacle);
  }
}

// What is no token, or ends the request, is no guess; nothing behind it is needed.
void Speculator::cut(Draft& draft, const Seat& seat, int64_t most) const {
  const auto wrong = [&](int32_t id) {
    return id < 0 || id >= vocab_size_ ||
           std::find(seat.stops.begin(), seat.stops.end(), id) != seat.stops.end();
  };
  std::vector<int32_t>& tokens = draft.tokens;
  if (std::ssize(tokens) > most) tokens.resize(static_cast<size_t>(most));
  tokens.erase(std::find_if(tokens.begin(), tokens.end(), wrong), tokens.end());
  draft.kind = std::clamp(draft.kind, 0, Drafter::kKinds - 1);
}

void Speculator::propose(std::span<Seat> seats, std::span<const DraftAsk> asks) {
  std::vector<Draft> drafts = speculation_.drafter->propose_all(asks);
  drafts.resize(seats.size());
  for (size_t i = 0; i < seats.size(); ++i) {
    seats[i].draft = std::move(drafts[i]);
    cut(seats[i].draft, seats[i], asks[i].most);
  }
}

// How many guesses each gets; asks: those that a drafter that takes time would have.
std::vector<int64_t> Speculator::choose(std::span<const DraftOffer> offers,
                                        std::span<DraftAsk> asks, int64_t rows,
                                        int64_t spare) const {
  if (speculation_.tokens == 0) {
    DraftSeconds draft_s;
    if (speculation_.drafter->takes_time()) {
      draft_s = [&](std::span<const int64_t> guesses) {
        for (size_t i = 0; i < asks.size(); ++i) asks[i].most = guesses[i];
        const double seconds = speculation_.drafter->seconds(asks);
        const bool tries = *std::max_element(guesses.begin(), guesses.end()) <= kFirst;
        return seconds > 0 || tries ? seconds : std::numeric_limits<double>::infinity();
      };
    }
    return guesses_that_pay(price_, rows, offers, spare, guessing_, draft_s);
  }
  std::vector<int64_t> guesses;
  for (const DraftOffer& offer : offers) {
    guesses.push_back(std::min(offer.most, spare));
    spare -= guesses.back();
  }
  return guesses;
}

void Speculator::guess(std::span<Seat> seats, int64_t rows) {
  drafting_s_ = 0;
  const int64_t spare = std::min(step_tokens_ - rows, step_outputs_ - std::ssize(seats));
  if (spare < 1) return;
  const bool takes_time = speculation_.drafter->takes_time();
  std::vector<DraftAsk> asks;
  for (const Seat& seat : seats) {
    const int64_t most = std::max<int64_t>(std::min({seat.most, spare, kMost}), 0);
    const int64_t wanted = speculation_.tokens > 0 ? std::min(speculation_.tokens, most) : most;
    asks.push_back({seat.id, seat.tokens, wanted});
  }
  if (!takes_time) propose(seats, asks);
  std::vector<DraftOffer> offers;
  for (size_t i = 0; i < seats.size(); ++i) {
    const Draft& draft = seats[i].draft;
    const auto own = own_.try_emplace(seats[i].id, all_, kOthers).first;
    offers.push_back(
        {own->second.rate(draft.kind), takes_time ? asks[i].most : std::ssize(draft.tokens)});
  }
  const std::vector<int64_t> guesses = choose(offers, asks, rows, spare);
  guessing_ = std::any_of(guesses.begin(), guesses.end(), [](int64_t count) { return count > 0; });
  if (takes_time && guessing_) {
    const auto begun = std::chrono::steady_clock::now();
    for (size_t i = 0; i < seats.size(); ++i) asks[i].most = guesses[i];
    propose(seats, asks);
    drafting_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }
  for (size_t i = 0; i < seats.size(); ++i) {
    std::vector<int32_t>& tokens = seats[i].draft.tokens;
    if (guesses[i] == 0 && offers[i].most > 0) {
      all_.skip(seats[i].draft.kind);
      own_.at(seats[i].id).skip(seats[i].draft.kind);
    }
    tokens.resize(std::min(tokens.size(), static_cast<size_t>(guesses[i])));
  }
}

double Speculator::note(const Tried& tried, int64_t rows, double seconds) {
  if (tried.guessed == 0) return 0;
  all_.note(tried.kind, tried.guessed, tried.accepted);
  if (const auto own = own_.find(tried.id); own != own_.end()) {
    own->second.note(tried.kind, tried.guessed, tried.accepted);
  }
  const double alone_s = price_.seconds(rows);
  const double saved_s =
      alone_s > 0 ? static_cast<double>(1 + tried.accepted) * alone_s - seconds : 0;
  counts_.guessed += tried.guessed;
  counts_.accepted += tried.accepted;
  counts_.saved_s += saved_s;
  return saved_s;
}

void Speculator::forget(RequestId id) {
  own_.erase(id);
  if (on()) speculation_.drafter->forget(id);
}

}  // namespace helm
