// Generations under constraints: forced runs against tokens drawn one by one, ends and errors.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "helm/generation.h"
#include "tiny_model.h"

namespace {

using helm::Finish;
using helm::Generation;
using helm::Request;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int32_t kEnd = 5;

// One free token of even id, then `run` given ones, and so on; the end after `length` tokens.
class Pattern : public helm::TokenConstraint {
 public:
  Pattern(int64_t vocab, int64_t length, int64_t run, bool forces)
      : vocab_(vocab), length_(length), run_(run), forces_(forces) {}

  void mask(std::span<uint32_t> allowed) override {
    if (at_ == fails_at) throw helm::Error(helm::ErrorKind::kInvalid, "the mask cannot be made");
    std::fill(allowed.begin(), allowed.end(), 0);
    if (at_ == empty_at) return;
    for (const int32_t id : choices(at_)) allowed[static_cast<size_t>(id) / 32] |= 1U << id % 32;
  }
  void commit(int32_t token) override {
    const std::vector<int32_t> may = choices(at_);
    if (std::find(may.begin(), may.end(), token) == may.end()) {
      throw helm::Error(helm::ErrorKind::kInvalid, "the token was not allowed");
    }
    if (at_ == refuses_at) throw helm::Error(helm::ErrorKind::kInvalid, "the token is refused");
    ++at_;
    stopped_ = token == kEnd;
  }
  std::vector<int32_t> forced() override {
    std::vector<int32_t> tokens;
    if (!forces_) return tokens;
    for (int64_t i = at_; i <= length_ && choices(i).size() == 1; ++i) {
      tokens.push_back(choices(i).front());
    }
    return tokens;
  }
  bool is_stopped() const override { return stopped_; }

  int64_t fails_at = -1, empty_at = -1, refuses_at = -1;

 private:
  std::vector<int32_t> choices(int64_t at) const {
    if (at >= length_) return {kEnd};
    if (at % (run_ + 1) != 0) {
      const auto given = static_cast<int32_t>((at * 7 + 9) % (vocab_ - 1) | 1);
      return {given == kEnd ? given + 2 : given};
    }
    std::vector<int32_t> even;
    for (int32_t id = 0; id < vocab_; id += 2) even.push_back(id);
    return even;
  }

  int64_t vocab_, length_, run_;
  bool forces_, stopped_ = false;
  int64_t at_ = 0;
};

struct Result {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  Finish finish = Finish::kNone;
  helm::RequestTimings timings;
  int64_t calls = 0;  // of advance()
};

std::vector<Result> run(helm::Engine& engine, const std::vector<Request>& requests) {
  Generation generation(engine, requests);
  std::vector<Result> results(requests.size());
  int64_t calls = 0;
  while (!generation.done()) {
    ++calls;
    for (const helm::Token& token : generation.advance(0)) {
      Result& result = results[static_cast<size_t>(token.request)];
      CHECK(result.finish == Finish::kNone);
      if (token.id >= 0) result.ids.push_back(token.id);
      result.logprobs.push_back(token.logprob);
      result.finish = token.finish;
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    results[i].timings = generation.timings(static_cast<int32_t>(i));
    results[i].calls = calls;
  }
  return results;
}

Request request_of(unsigned seed, std::shared_ptr<helm::TokenConstraint> constraint) {
  Request request;
  request.prompt = token_ids(9, seed);
  request.max_tokens = 60;
  request.stop_tokens = {kEnd};
  request.sampling = {.temperature = 1.5F, .seed = seed};
  request.constraint = std::move(constraint);
  return request;
}

std::shared_ptr<Pattern> pattern(const TinyShape& shape, int64_t length, int64_t run, bool forces) {
  return std::make_shared<Pattern>(shape.vocab, length, run, forces);
}

}  // namespace

TEST_CASE("forced runs are computed together, and give the tokens that drawing gives") {
  for (const bool groups : {false, true}) {
    TinyShape shape;
    shape.step_tokens = 7;  // some runs take several steps
    if (groups) {
      shape.devices = {"accelerator", "accelerator", "accelerator", "cpu"};
      shape.accelerator_pages = shape.pages;
      shape.overlap = true;
      shape.decode_groups = 2;
    }
    const auto engine = tiny_engine(tiny_model(shape));
    std::vector<Request> forced, drawn;
    for (const int64_t length : {1, 5, 17, 40}) {
      const auto seed = static_cast<unsigned>(length);
      forced.push_back(request_of(seed, pattern(shape, length, 1 + length / 4, true)));
      drawn.push_back(request_of(seed, pattern(shape, length, 1 + length / 4, false)));
    }
    const std::vector<Result> expected = run(*engine, drawn), found = run(*engine, forced);
    for (size_t i = 0; i < expected.size(); ++i) {
      CAPTURE(i);
      CHECK(found[i].ids == expected[i].ids);
      CHECK(found[i].finish == Finish::kStop);
      CHECK(found[i].ids.back() == kEnd);
      CHECK(found[i].timings.decode_tokens == std::ssize(found[i].ids) - 1);
    }
    CHECK(found[0].calls <= expected[0].calls / 2);
  }
}

TEST_CASE("with log-probabilities every token is drawn and has one") {
  const TinyShape shape;
  const auto engine = tiny_engine(tiny_model(shape));
  Request with = request_of(3, pattern(shape, 12, 3, true));
  with.sampling.logprobs = 0;
  const Request without = request_of(3, pattern(shape, 12, 3, true));
  const std::vector<Result> found = run(*engine, {with, without});
  CHECK(found[0].ids == found[1].ids);
  for (const float logprob : found[0].logprobs) CHECK(logprob <= 0);
}

TEST_CASE("a forced run ends where tokens or positions do") {
  const TinyShape shape;
  const auto engine = tiny_engine(tiny_model(shape));
  const std::vector<int32_t> whole =
      run(*engine, {request_of(3, pattern(shape, 40, 9, true))})[0].ids;
  for (const int64_t most : {1, 2, 5, 10, 11, 12}) {
    Request request = request_of(3, pattern(shape, 40, 9, true));
    request.max_tokens = most;
    const Result cut = run(*engine, {request})[0];
    CHECK(cut.ids == std::vector<int32_t>(whole.begin(), whole.begin() + most));
    CHECK(cut.finish == Finish::kLength);

    request = request_of(3, pattern(shape, 40, 9, true));
    request.sequence = engine->open(9 + most - 1);
    const Result full = run(*engine, {request})[0];
    CHECK(full.ids == cut.ids);
    CHECK(full.finish == Finish::kLength);
    engine->close(request.sequence);
  }
}

TEST_CASE("the end of a constraint ends a request that has no such stop token") {
  const TinyShape shape;
  const auto engine = tiny_engine(tiny_model(shape));
  for (const bool forces : {true, false}) {
    Request request = request_of(3, pattern(shape, 6, 2, forces));
    request.stop_tokens.clear();
    const Result result = run(*engine, {request})[0];
    CHECK(result.ids.size() == 7);
    CHECK(result.finish == Finish::kStop);
  }
}

TEST_CASE("a constraint that fails or allows nothing ends its request alone, with the reason") {
  const TinyShape shape;
  const auto engine = tiny_engine(tiny_model(shape));
  const Request other = request_of(8, pattern(shape, 20, 3, true));
  const Result alone = run(*engine, {request_of(8, pattern(shape, 20, 3, true))})[0];
  const auto fails = [&](int64_t Pattern::* where, int64_t at, const char* reason) {
    const auto bad = pattern(shape, 20, 0, false);
    (*bad).*where = at;
    Generation generation(*engine,
                          {request_of(2, bad), request_of(8, pattern(shape, 20, 3, true))});
    std::vector<int32_t> ids;
    Finish finish = Finish::kNone;
    int64_t before = 0;
    while (!generation.done()) {
      for (const helm::Token& token : generation.advance(0)) {
        if (token.request == 1) ids.push_back(token.id);
        if (token.request == 0) finish = token.finish;
        if (token.request == 0 && token.id >= 0) ++before;
      }
    }
    CHECK(finish == Finish::kError);
    CHECK(before == at);
    CHECK(ids == alone.ids);
    CHECK_THROWS_WITH_AS(generation.rethrow(0), doctest::Contains(reason), helm::Error);
    CHECK(engine->can_open(shape.context));
  };
  for (const int64_t at : {0, 4}) {
    fails(&Pattern::fails_at, at, "the mask cannot be made");
    fails(&Pattern::empty_at, at, "allows no token");
    fails(&Pattern::refuses_at, at, "the token is refused");
  }
}

TEST_CASE("rows of a large vocabulary are drawn by all threads, each as alone") {
  TinyShape shape;
  shape.vocab = 20'003;
  shape.hidden = 8;
  const auto engine = tiny_engine(tiny_model(shape));
  std::vector<Request> requests;
  for (unsigned seed = 0; seed < 4; ++seed) {
    requests.push_back(request_of(seed, seed % 2 == 0 ? nullptr : pattern(shape, 18, 3, true)));
    requests.back().max_tokens = 20;
    requests.back().sampling.top_p = seed < 2 ? 1.0F : 0.9F;
  }
  const std::vector<Result> together = run(*engine, requests);
  for (unsigned seed = 0; seed < 4; ++seed) {
    Request request = requests[seed];
    if (request.constraint) request.constraint = pattern(shape, 18, 3, true);
    CHECK(run(*engine, {request})[0].ids == together[seed].ids);
  }
}
