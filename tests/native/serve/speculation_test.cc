// Services that guess: whatever comes and goes, each request gets what it gets alone without.
#include "helm/speculation.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "helm/service.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Draft;
using helm::Drafter;
using helm::Engine;
using helm::Finish;
using helm::Outbox;
using helm::Request;
using helm::RequestId;
using helm::Service;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

// Knows the texts of all requests: guesses what comes, the first wrong token anywhere.
class Adversary final : public Drafter {
 public:
  explicit Adversary(std::vector<std::vector<int32_t>> texts) : texts_(std::move(texts)) {}
  Draft propose(int64_t, std::span<const int32_t> tokens, int64_t most) override {
    Draft draft;
    for (const auto& text : texts_) {
      if (text.size() < tokens.size() || !std::equal(tokens.begin(), tokens.end(), text.begin())) {
        continue;
      }
      draft.tokens.assign(text.begin() + std::ssize(tokens), text.end());
      break;
    }
    draft.tokens.resize(std::min(draft.tokens.size(), static_cast<size_t>(random_() % 6)));
    while (std::ssize(draft.tokens) < most + 2) {
      draft.tokens.push_back(static_cast<int32_t>(random_() % 64) - 1);
    }
    draft.kind = static_cast<int32_t>(random_() % 9) - 1;
    return draft;
  }
  void forget(int64_t) override { ++forgotten; }

  int64_t forgotten = 0;

 private:
  std::vector<std::vector<int32_t>> texts_;
  std::mt19937 random_{17};
};

Request request_of(int32_t i) {
  Request request;
  request.prompt = token_ids(3 + 7 * i, i % 3);
  request.max_tokens = 1 + (5 * i) % 23;
  request.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
  request.sampling.repetition_penalty = i % 3 == 0 ? 1.3F : 1.0F;
  request.sampling.seed = static_cast<uint64_t>(i);
  return request;
}

TinyShape shape_of(bool split) {
  TinyShape shape;
  if (!split) return shape;
  shape.devices = {"accelerator", "accelerator", "accelerator", "cpu"};
  shape.accelerator_pages = shape.pages;
  shape.overlap = true;
  shape.decode_groups = 2;
  return shape;
}

}  // namespace

TEST_CASE("requests that come and go beside wrong guesses get what each gets alone without") {
  const std::shared_ptr<Engine> reference = tiny_engine(tiny_model());
  std::vector<Request> kinds;
  std::vector<std::vector<int32_t>> expected, texts;
  for (int32_t i = 0; i < 12; ++i) {
    kinds.push_back(request_of(i));
    expected.push_back(helm::test::generated(*reference, {kinds.back()})[0]);
    texts.push_back(kinds.back().prompt);
    texts.back().insert(texts.back().end(), expected.back().begin(), expected.back().end());
  }
  for (const bool keeps : {false, true}) {
    for (const bool split : {false, true}) {
      for (const int64_t tokens : {0, 3}) {
        CAPTURE(keeps);
        CAPTURE(split);
        CAPTURE(tokens);
        const std::shared_ptr<Engine> engine = tiny_engine(tiny_model(shape_of(split)));
        const auto adversary = std::make_shared<Adversary>(texts);
        Service service(engine, {keeps, {adversary, tokens}});
        std::mt19937 random(split ? 5 : 3);
        int64_t submitted = 0, cancels = 0;
        for (int schedule = 0; schedule < (helm::test::kFew ? 3 : 20); ++schedule) {
          CAPTURE(schedule);
          const auto outbox = std::make_shared<Outbox>();
          std::map<RequestId, size_t> kind_of;
          std::vector<RequestId> cancelled;
          for (int action = 0; action < 16; ++action) {
            const uint32_t what = random() % 8;
            if (what < 5) {
              const size_t kind = random() % kinds.size();
              kind_of[service.submit(kinds[kind], outbox)] = kind;
              ++submitted;
            } else if (what == 5 && !kind_of.empty()) {
              auto it = kind_of.begin();
              std::advance(it, static_cast<int64_t>(random() % kind_of.size()));
              service.cancel(it->first);
              cancelled.push_back(it->first);
              ++cancels;
            } else {
              outbox->wait(0.0003);
            }
          }
          REQUIRE(outbox->wait(60, true));
          std::map<RequestId, std::vector<int32_t>> got;
          for (const helm::Event& event : outbox->poll()) {
            if (event.token.id >= 0) got[event.token.request].push_back(event.token.id);
          }
          for (const auto& [id, kind] : kind_of) {
            const auto& want = expected[kind];
            if (std::find(cancelled.begin(), cancelled.end(), id) == cancelled.end()) {
              CHECK(got[id] == want);
            } else {
              REQUIRE(got[id].size() <= want.size());
              CHECK(std::equal(got[id].begin(), got[id].end(), want.begin()));
            }
          }
        }
        const helm::ServiceStats stats = service.stats();
        CHECK(stats.kv_blocks_used == 0);
        CHECK(stats.accepted_tokens <= stats.guessed_tokens);
        if (tokens > 0 && !split) {
          CHECK(stats.accepted_tokens > 0);
          CHECK(stats.accepted_tokens < stats.guessed_tokens);
        }
        service.stop(0);
        CHECK(adversary->forgotten <= submitted);  // who is cancelled while waiting is not known
        CHECK(adversary->forgotten >= submitted - cancels);
      }
    }
  }
}

TEST_CASE("right guesses save steps, and no guess goes beyond what is left") {
  const std::shared_ptr<Engine> engine = tiny_engine(tiny_model());
  Request request;
  request.prompt = token_ids(20, 1);
  request.max_tokens = 40;
  const std::vector<int32_t> expected = helm::test::generated(*engine, {request})[0];
  class Right final : public Drafter {
   public:
    explicit Right(std::vector<int32_t> text) : text_(std::move(text)) {}
    Draft propose(int64_t, std::span<const int32_t> tokens, int64_t most) override {
      longest = std::max(longest, std::ssize(tokens) + most);
      return {{text_.begin() + std::ssize(tokens), text_.end()}, 0};
    }
    int64_t longest = 0;

   private:
    std::vector<int32_t> text_;
  };
  std::vector<int32_t> text = request.prompt;
  text.insert(text.end(), expected.begin(), expected.end());
  const auto right = std::make_shared<Right>(text);
  Service service(engine, {false, {right, 3}});
  const auto outbox = std::make_shared<Outbox>();
  service.submit(request, outbox);
  REQUIRE(outbox->wait(60, true));
  const std::vector<helm::Event> events = outbox->poll();
  REQUIRE(events.size() == 40);
  const helm::RequestTimings& timings = events.back().timings;
  CHECK(timings.decode_tokens == 39);
  CHECK(timings.accepted_tokens == timings.guessed_tokens);
  CHECK(timings.accepted_tokens == 29);  // 39 tokens in steps of 4, the last of 3
  CHECK(service.stats().steps == 1 + 10);
  CHECK(right->longest < 60);  // the last token is drawn, never guessed
}

TEST_CASE("plans that cannot compute guesses are refused with the reason") {
  const auto refused = [](const std::string& path, const std::string& value, TinyShape shape,
                          const char* reason) {
    const std::shared_ptr<Engine> engine = tiny_engine(tiny_model(shape).with(path, value));
    CHECK_THROWS_WITH_AS(Service(engine, {true, {helm::ngram_drafter()}}),
                         doctest::Contains(reason), helm::Error);
    Service off(engine);
  };
  TinyShape one;
  one.sequences = 1;
  refused("/limits/step_outputs", "1", one, "step_outputs is 1");
  TinyShape far = shape_of(true);
  far.overlap = false;
  far.decode_groups = 1;
  far.accelerator_pages = 40;
  refused("/limits/context", "200", far, "overflow to host memory");
}
