// A model that guesses for another: right where it is the same model, cheap where it is not, and no
// token changes; its engine's KV is kept, cut and given back.
#include "serve/model_drafter.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "helm/service.h"
#include "serve/speculator.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Draft;
using helm::DraftAsk;
using helm::Drafter;
using helm::Engine;
using helm::Finish;
using helm::ModelDrafter;
using helm::Outbox;
using helm::Request;
using helm::Service;
using helm::Speculator;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

std::shared_ptr<Engine> engine_of(const TinyShape& shape = {}) {
  return tiny_engine(tiny_model(shape));
}

// The greedy continuation, a step per token.
std::vector<int32_t> continued(Engine& engine, std::vector<int32_t> text, int64_t most) {
  Request request;
  request.prompt = std::move(text);
  request.max_tokens = most;
  return helm::test::generated(engine, {request})[0];
}

std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b, size_t count) {
  a.insert(a.end(), b.begin(), b.begin() + static_cast<std::ptrdiff_t>(count));
  return a;
}

// Guesses at a price that it is told, and counts what it is asked for.
class Priced final : public Drafter {
 public:
  Draft propose(int64_t, std::span<const int32_t>, int64_t most) override {
    ++asked;
    guessed += most;
    return {std::vector<int32_t>(static_cast<size_t>(most), 1), 0};
  }
  bool takes_time() const override { return true; }
  double seconds(std::span<const DraftAsk> asks) const override {
    int64_t most = 0;
    for (const DraftAsk& ask : asks) most = std::max(most, ask.most);
    if (asked == 0 && each_s > 1) return 0;  // not known yet
    return each_s * static_cast<double>(most);
  }
  double expected(int32_t) const override { return 0.7; }
  double each_s = 0;
  int64_t asked = 0, guessed = 0;
};

}  // namespace

TEST_CASE("a model drafts what it would say itself, after right and wrong guesses alike") {
  TinyShape windowed{.page_tokens = 4, .window = 9};
  windowed.window_blocks = windowed.sequences * ((9 + windowed.step_tokens + 4 - 3) / 4 + 1);
  for (const TinyShape& shape : {TinyShape{}, windowed}) {
    CAPTURE(shape.window);
    const auto reference = engine_of(shape);
    const auto engine = engine_of(shape);
    ModelDrafter drafter(engine);
    std::vector<int32_t> text = token_ids(40, 1);
    for (const auto& [most, taken] :
         std::vector<std::pair<int64_t, size_t>>{{4, 4}, {3, 1}, {1, 1}, {6, 0}, {5, 5}, {2, 2}}) {
      CAPTURE(text.size());
      const Draft draft = drafter.propose(7, text, most);
      CHECK(draft.tokens == continued(*reference, text, most));
      CHECK(draft.kind == 0);
      text = joined(std::move(text), draft.tokens, taken);
      text.push_back(static_cast<int32_t>(text.size() % 61));  // what was drawn in its place
    }
    drafter.forget(7);
    drafter.forget(7);
    drafter.forget(8);
    CHECK(drafter.propose(9, text, 3).tokens == continued(*reference, text, 3));  // what was kept
  }
}

TEST_CASE("several requests share a draft's steps, and long texts take several") {
  const auto reference = engine_of();
  ModelDrafter drafter(engine_of());
  std::vector<std::vector<int32_t>> texts;
  for (int32_t i = 0; i < 4; ++i) texts.push_back(token_ids(3 + 29 * i, i));  // of 32 rows a step
  for (int round = 0; round < 3; ++round) {
    std::vector<DraftAsk> asks;
    for (int64_t i = 0; i < 4; ++i) {
      asks.push_back({i, texts[static_cast<size_t>(i)], (i + round) % 4});
    }
    const std::vector<Draft> drafts = drafter.propose_all(asks);
    REQUIRE(drafts.size() == 4);
    for (size_t i = 0; i < 4; ++i) {
      CAPTURE(i);
      const std::vector<int32_t> want = continued(*reference, texts[i], 3);
      CHECK(std::ssize(drafts[i].tokens) == asks[i].most);
      CHECK(std::equal(drafts[i].tokens.begin(), drafts[i].tokens.end(), want.begin()));
      texts[i] = joined(texts[i], want, 2);
    }
  }
}

TEST_CASE("where a draft has no room, nothing is guessed, and idle requests give theirs") {
  TinyShape small;
  small.context = 64;
  small.pages = 2 * 2 * 4;  // two whole contexts
  const auto reference = engine_of();
  ModelDrafter drafter(engine_of(small));
  for (int64_t request = 0; request < 9; ++request) {
    const std::vector<int32_t> text = token_ids(40, static_cast<int32_t>(request));
    CHECK(drafter.propose(request, text, 3).tokens == continued(*reference, text, 3));
  }
  std::vector<std::vector<int32_t>> texts;
  std::vector<DraftAsk> asks;
  for (int32_t i = 0; i < 4; ++i) texts.push_back(token_ids(50, 20 + i));
  for (int64_t i = 0; i < 4; ++i) asks.push_back({i, texts[static_cast<size_t>(i)], 3});
  const std::vector<Draft> drafts = drafter.propose_all(asks);
  const auto none = [](const Draft& draft) { return draft.tokens.empty(); };
  CHECK(std::count_if(drafts.begin(), drafts.end(), none) == 2);
  CHECK(drafter.propose(30, token_ids(64, 1), 8).tokens.size() == 1);  // the last position
  CHECK(drafter.propose(31, token_ids(65, 1), 8).tokens.empty());
  CHECK(drafter.propose(32, std::vector<int32_t>{5, 61}, 8).tokens.empty());  // no token of its own
  CHECK(drafter.propose(33, std::vector<int32_t>{}, 8).tokens.empty());
  CHECK(drafter.propose(34, token_ids(5, 1), 0).tokens.empty());
  CHECK_THROWS_WITH_AS(helm::model_drafter(nullptr), doctest::Contains("no engine was given"),
                       helm::Error);
}

TEST_CASE("a draft's price has its own steps, and a long text is laid on many") {
  ModelDrafter drafter(engine_of());
  std::vector<int32_t> text = token_ids(100, 1);
  const auto seconds = [&](int64_t most) {
    const DraftAsk ask{1, text, most};
    return drafter.seconds({&ask, 1});
  };
  CHECK(seconds(3) == 0);
  const std::vector<int32_t> guesses = drafter.propose(1, text, 4).tokens;
  text = joined(text, guesses, 4);
  text.push_back(3);
  CHECK(seconds(0) < seconds(1));
  CHECK(seconds(4) > seconds(2));
  CHECK(seconds(2) > seconds(1));
  const double near_s = seconds(4);
  text = joined(text, token_ids(60, 2), 60);
  CHECK(seconds(4) > 0);
  CHECK(seconds(4) < 20 * near_s);
}

TEST_CASE("services that draft with a model tell what they tell without, and leave nothing") {
  TinyShape other;
  other.layers = 1;
  other.hidden = 16;
  const auto reference = engine_of();
  for (const bool same : {true, false}) {
    for (const int64_t tokens : {0, 4}) {
      CAPTURE(same);
      CAPTURE(tokens);
      const auto drafts = engine_of(same ? TinyShape{} : other);
      {
        Service service(engine_of(), {true, {helm::model_drafter(drafts), tokens}});
        std::vector<std::vector<int32_t>> want;
        std::vector<std::shared_ptr<Outbox>> outboxes;
        for (int32_t i = 0; i < 6; ++i) {
          Request request;
          request.prompt = token_ids(5 + 11 * i, i);
          request.max_tokens = 24;
          request.sampling.temperature = i % 2 == 0 ? 0.0F : 0.9F;
          request.sampling.seed = static_cast<uint64_t>(i);
          want.push_back(helm::test::generated(*reference, {request})[0]);
          outboxes.push_back(std::make_shared<Outbox>());
          const helm::RequestId id = service.submit(request, outboxes.back());
          if (i == 3) service.cancel(id);
        }
        for (size_t i = 0; i < want.size(); ++i) {
          REQUIRE(outboxes[i]->wait(60, true));
          std::vector<int32_t> got;
          for (const helm::Event& event : outboxes[i]->poll()) got.push_back(event.token.id);
          if (i != 3) CHECK(got == want[i]);
        }
        const helm::ServiceStats stats = service.stats();
        if (tokens > 0) {
          CHECK(stats.guessed_tokens > 0);
          const double right = static_cast<double>(stats.accepted_tokens) /
                               static_cast<double>(stats.guessed_tokens);
          CHECK((same ? right > 0.6 : right < 0.4));
        }
        Request last;  // still drafting when the service ends
        last.prompt = token_ids(20, 3);
        last.max_tokens = 150;
        service.submit(last, outboxes[0]);
      }
      CHECK(drafts.use_count() == 1);
      CHECK(drafts->can_open(drafts->plan().limits.context));
    }
  }
}

TEST_CASE("a drafter that takes time is asked for as much as pays, and rests where none does") {
  const auto engine = engine_of();
  for (const double each_s : {0.1, 0.4, 1.5}) {
    for (const bool right : {true, false}) {
      CAPTURE(each_s);
      CAPTURE(right);
      const auto drafter = std::make_shared<Priced>();
      drafter->each_s = each_s;
      Speculator speculator(engine->plan(), {drafter});
      const std::vector<int32_t> text = token_ids(10, 1);
      for (int step = 0; step < 400; ++step) {
        Speculator::Seat seat{1, text, {}, 8, {}};
        speculator.guess({&seat, 1}, 1);
        const int64_t guessed = std::ssize(seat.draft.tokens);
        speculator.note({1, 0, guessed, right ? guessed : 0}, 1, 1);
        speculator.note_step(1 + guessed, 1 + 0.05 * static_cast<double>(guessed));
      }
      CHECK(speculator.counts().guessed == drafter->guessed);
      if (each_s > 1) {
        CHECK(drafter->asked == 1);  // a guess costs more than the step that it may save
        CHECK(drafter->guessed <= 2);
      } else if (right) {
        CHECK(drafter->asked > 390);
        CHECK(drafter->guessed > 6 * drafter->asked);
      } else {
        CHECK(drafter->asked < (each_s < 0.2 ? 60 : 30));
        CHECK(drafter->asked > 0);
      }
    }
  }
}
