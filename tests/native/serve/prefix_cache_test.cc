// Prompts that begin alike: the same tokens and probabilities as without reuse, wherever KV pages
// lie; the prefix computed once; kept sequences that give way; files that others cannot load.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "helm/prefix_cache.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::PrefixCache;
using helm::SequenceId;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyModel;
using helm::test::TinyShape;
using helm::test::token_ids;
using Ids = std::vector<int32_t>;

constexpr int64_t kLayers = 3;
constexpr int64_t kContext = 200;
const std::string kPath = "helm-prefix-cache-test.kv";

TinyShape shape_of(const std::string& units = "ccccc", int64_t slots = 1000) {
  TinyShape shape;
  shape.layers = kLayers;
  shape.context = kContext;
  const int64_t blocks = 13 * shape.sequences;
  int64_t own = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    shape.devices.push_back(units[i] == 'a' ? "accelerator" : "cpu");
    own += units[i] == 'a' && i > 0 && i + 1 < units.size();
  }
  shape.pages = kLayers * blocks;
  shape.accelerator_pages = own * std::min(slots, blocks);
  return shape;
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

helm::Request request_of(Ids prompt, int64_t tokens, uint64_t seed) {
  helm::Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = tokens;
  request.sampling.temperature = seed % 2 == 0 ? 0.0F : 1.0F;
  request.sampling.seed = seed;
  request.sampling.logprobs = 0;
  return request;
}

struct Result {
  std::vector<Ids> tokens;
  std::vector<std::vector<float>> logprobs;
  std::vector<int64_t> prefill_tokens;

  int64_t computed() const {
    int64_t sum = 0;
    for (const int64_t count : prefill_tokens) sum += count;
    return sum;
  }
};

Result generate(Engine& engine, const std::vector<helm::Request>& requests, PrefixCache* prefixes) {
  helm::Generation generation(engine, requests, prefixes);
  Result result;
  result.tokens.resize(requests.size());
  result.logprobs.resize(requests.size());
  while (!generation.done()) {
    for (const helm::Token& token : generation.advance(0)) {
      result.tokens[static_cast<size_t>(token.request)].push_back(token.id);
      result.logprobs[static_cast<size_t>(token.request)].push_back(token.logprob);
    }
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    result.prefill_tokens.push_back(generation.timings(static_cast<int32_t>(i)).prefill_tokens);
  }
  return result;
}

// Nine prompts, more than run at once, of which eight begin with the same 80 tokens.
std::vector<helm::Request> nine_requests() {
  const Ids system = token_ids(80, 1);
  std::vector<helm::Request> requests;
  for (int32_t i = 0; i < 8; ++i) {
    requests.push_back(request_of(joined(system, token_ids(3 + 5 * i, 20 + i)), 6 + i % 3,
                                  static_cast<uint64_t>(i)));
  }
  requests.insert(requests.begin() + 1, request_of(token_ids(40, 50), 9, 3));
  return requests;
}

int64_t prompt_tokens(const std::vector<helm::Request>& requests) {
  int64_t sum = 0;
  for (const helm::Request& request : requests) sum += std::ssize(request.prompt);
  return sum;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Everything is free again.
void check_all_free(Engine& engine) {
  std::vector<SequenceId> full;
  for (int64_t i = 0; i < engine.plan().limits.sequences; ++i)
    full.push_back(engine.open(kContext));
  for (const SequenceId id : full) engine.close(id);
}

}  // namespace

TEST_CASE("prompts of one call share their prefix and get what they get alone") {
  const std::vector<helm::Request> requests = nine_requests();
  const auto on_cpu = tiny_engine(tiny_model(shape_of()));
  const Result alone = generate(*on_cpu, requests, nullptr);
  CHECK(alone.computed() == prompt_tokens(requests));
  for (const bool overlap : {false, true}) {
    for (const char* units : {"ccccc", "ccaaa", "acaca", "aaaaa"}) {
      CAPTURE(std::string(units));
      CAPTURE(overlap);
      TinyShape shape = shape_of(units);
      shape.overlap = overlap;
      shape.decode_groups = overlap ? 2 : 1;
      if (std::string(units) == "ccccc") shape.overlap = false, shape.decode_groups = 1;
      const auto engine = tiny_engine(tiny_model(shape));
      PrefixCache prefixes(*engine);
      const Result shared = generate(*engine, requests, &prefixes);
      CHECK(shared.tokens == alone.tokens);
      CHECK(shared.logprobs == alone.logprobs);
      CHECK(shared.computed() == alone.computed() - 7 * 80);
      CHECK(prefixes.kept() > 1);
      const Result again = generate(*engine, requests, &prefixes);
      CHECK(again.tokens == alone.tokens);
      CHECK(again.logprobs == alone.logprobs);
      CHECK(again.computed() <= shared.computed() - 80);
      prefixes.clear();
      check_all_free(*engine);
    }
  }
}

TEST_CASE("prefixes are shared where KV pages overflow") {
  const std::vector<helm::Request> requests = nine_requests();
  const Result alone = generate(*tiny_engine(tiny_model(shape_of())), requests, nullptr);
  for (const char* site : {"stream", "cpu"}) {
    for (const char* units : {"ccaaa", "cacac", "aaaaa"}) {
      CAPTURE(std::string(site));
      CAPTURE(std::string(units));
      TinyShape shape = shape_of(units, 10);
      shape.overflow = site;
      const auto engine = tiny_engine(tiny_model(shape));
      PrefixCache prefixes(*engine);
      for (int round = 0; round < 3; ++round) {
        const Result shared = generate(*engine, requests, &prefixes);
        CHECK(shared.tokens == alone.tokens);
        CHECK(shared.computed() <= alone.computed() - 7 * 80);
      }
      CHECK(engine->stats().evicted_blocks > 0);
      prefixes.clear();
      check_all_free(*engine);
    }
  }
}

TEST_CASE(
    "a prompt goes on in the sequence that holds its beginning and forks from one with more") {
  const auto engine = tiny_engine(tiny_model(shape_of()));
  PrefixCache prefixes(*engine);
  const Ids first = token_ids(50, 1);
  const Result one = generate(*engine, {request_of(first, 10, 0)}, &prefixes);
  CHECK(prefixes.kept() == 1);
  Ids next = joined(joined(first, one.tokens[0]), token_ids(4, 2));
  CHECK(prefixes.find(next) == 59);  // the last token was never fed
  generate(*engine, {request_of(next, 3, 0)}, &prefixes);
  CHECK(prefixes.kept() == 1);
  generate(*engine, {request_of(joined(first, token_ids(9, 7)), 3, 0)}, &prefixes);
  CHECK(prefixes.kept() == 2);
  CHECK(prefixes.find(next) == 63);   // still there
  CHECK(prefixes.find(first) == 49);  // one token at least is computed
  CHECK(prefixes.find(token_ids(PrefixCache::kLeastShared - 1, 1)) == 0);
  CHECK(prefixes.find(token_ids(50, 3)) == 0);
  // A kept sequence takes no more pages than it holds: three full contexts still fit.
  prefixes.clear();
  generate(*engine, {request_of(token_ids(10, 1), 3, 0)}, &prefixes);
  for (int i = 0; i < 3; ++i) engine->open(kContext);
}

TEST_CASE("what is kept never refuses a request, the least recently used goes first") {
  TinyShape shape = shape_of();
  shape.pages = kLayers * 20;  // one full context takes 13
  const auto engine = tiny_engine(tiny_model(shape));
  PrefixCache prefixes(*engine);
  for (const int32_t seed : {1, 2, 3}) {
    generate(*engine, {request_of(token_ids(60, seed), 1, 0)}, &prefixes);  // four blocks each
  }
  CHECK(prefixes.find(token_ids(60, 1)) == 59);  // looking is not using
  generate(*engine, {request_of(token_ids(60, 1), 1, 0)}, &prefixes);
  const PrefixCache::Opened large = prefixes.open(token_ids(30, 9), 190);  // 12 of 20 blocks
  CHECK(large.cached == 0);
  CHECK(prefixes.find(token_ids(60, 2)) == 0);
  CHECK(prefixes.find(token_ids(60, 3)) > 0);
  CHECK(prefixes.find(token_ids(60, 1)) > 0);
  CHECK(!prefixes.try_open(token_ids(30, 8), 190));
  CHECK(prefixes.kept() == 2);  // giving them up would not be enough
  CHECK_THROWS_AS(prefixes.open(token_ids(30, 8), 190), helm::Error);
  prefixes.close(large.sequence);
  prefixes.clear();
  // In a pool of one context, a prompt that shares a part takes over the sequence that holds it.
  shape.pages = kLayers * 13;
  shape.sequences = 1;
  const auto small = tiny_engine(tiny_model(shape));
  PrefixCache only(*small);
  generate(*small, {request_of(token_ids(150, 1), 5, 0)}, &only);
  const Ids other = joined(token_ids(100, 1), token_ids(80, 5));
  const Result cut = generate(*small, {request_of(other, 20, 0)}, &only);
  CHECK(cut.prefill_tokens[0] == 80);
  CHECK(cut.tokens == generate(*engine, {request_of(other, 20, 0)}, nullptr).tokens);
}

TEST_CASE("a prompt that shares more than it may hold begins with what it may") {
  TinyShape shape = shape_of();
  shape.sequences = 2;
  const auto engine = tiny_engine(tiny_model(shape));
  for (const bool room : {true, false}) {
    PrefixCache prefixes(*engine);
    generate(*engine, {request_of(token_ids(60, 1), 1, 0)}, &prefixes);
    const SequenceId other = room ? -1 : engine->open(20);
    const PrefixCache::Opened opened = prefixes.open(token_ids(50, 1), 20);
    CHECK(opened.cached == 20);
    CHECK(engine->length(opened.sequence) == 20);
    prefixes.close(opened.sequence);
    if (!room) engine->close(other);
    CHECK_THROWS_AS(prefixes.open(token_ids(50, 1), 0), helm::Error);
  }
}

TEST_CASE("any order of calls on a small pool gives what computing anew gives") {
  for (const auto& [units, slots] :
       {std::pair{"ccccc", 1000}, {"ccaaa", 1000}, {"ccaaa", 10}, {"acaca", 11}}) {
    CAPTURE(std::string(units));
    CAPTURE(slots);
    TinyShape shape = shape_of(units, slots);
    const int64_t blocks = 22;
    shape.accelerator_pages =
        std::min(shape.accelerator_pages, shape.accelerator_pages / 52 * blocks);
    if (slots < blocks) shape.accelerator_pages = shape_of(units, slots).accelerator_pages;
    shape.pages = kLayers * blocks;
    const auto engine = tiny_engine(tiny_model(shape));
    const auto reference = tiny_engine(tiny_model(shape_of()));
    PrefixCache prefixes(*engine);
    std::mt19937 random(static_cast<uint32_t>(slots));
    const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
    int64_t saved = 0;
    for (int call = 0; call < (helm::test::kFew ? 10 : 40); ++call) {
      std::vector<helm::Request> requests;
      for (int32_t i = 0; i <= below(6); ++i) {
        const Ids prompt =
            joined(token_ids(1 + below(120), below(2)), token_ids(1 + below(50), 5 + below(3)));
        requests.push_back(request_of(prompt, 1 + below(25), static_cast<uint64_t>(2 * below(9))));
      }
      const Result want = generate(*reference, requests, nullptr);
      const Result got = generate(*engine, requests, &prefixes);
      REQUIRE(got.tokens == want.tokens);
      if (slots == 1000) REQUIRE(got.logprobs == want.logprobs);
      saved += want.computed() - got.computed();
    }
    CHECK(saved > (helm::test::kFew ? 200 : 1000));
    prefixes.clear();
    const SequenceId whole = engine->open(kContext);
    engine->open(9 * 16);
    CHECK_THROWS_AS(engine->open(1), helm::Error);  // 13 and 9 of 22 blocks
    engine->close(whole);
  }
}

TEST_CASE("a request whose prefix was being computed goes on when that is cancelled") {
  const auto engine = tiny_engine(tiny_model(shape_of()));
  PrefixCache prefixes(*engine);
  const std::vector<helm::Request> requests = {request_of(joined(token_ids(150, 1), {1}), 5, 0),
                                               request_of(joined(token_ids(150, 1), {2}), 5, 0)};
  const Result want = generate(*engine, requests, nullptr);
  helm::Generation generation(*engine, requests, &prefixes);
  generation.advance(0);  // 32 of 150
  CHECK(generation.timings(1).prefill_tokens == 0);
  generation.cancel(0);
  Ids got;
  while (!generation.done()) {
    for (const helm::Token& token : generation.advance(0)) got.push_back(token.id);
  }
  CHECK(got == want.tokens[1]);
  CHECK(generation.timings(1).prefill_tokens == 151 - 32);
}

TEST_CASE("a saved prefix is found again, and a save that fails leaves the file") {
  const auto engine = tiny_engine(tiny_model(shape_of()));
  PrefixCache prefixes(*engine);
  const Ids prompt = token_ids(90, 1);
  const Result first = generate(*engine, {request_of(prompt, 8, 0)}, &prefixes);
  const Ids all = joined(prompt, first.tokens[0]);
  CHECK_THROWS_AS(prefixes.save(token_ids(5, 3), kPath), helm::Error);
  CHECK(prefixes.save(all, kPath, "{\"a\": 1}") == 97);
  const auto cancel = [](int64_t, int64_t) { throw std::runtime_error("enough"); };
  CHECK_THROWS_AS(prefixes.save(prompt, kPath, "", cancel), std::runtime_error);
  CHECK_THROWS_AS(prefixes.save(prompt, "no-such-folder/x.kv"), helm::Error);

  // The file says nothing of what its last page held before.
  const std::string saved = content_of(kPath);
  generate(*engine, {request_of(token_ids(190, 5), 1, 0)}, &prefixes);
  prefixes.clear();
  const Result second = generate(*engine, {request_of(prompt, 8, 0)}, &prefixes);
  CHECK(second.prefill_tokens[0] == 90);
  prefixes.save(all, kPath, "{\"a\": 1}");
  CHECK(content_of(kPath) == saved);

  // A pool that is full of other kept sequences makes room.
  TinyShape shape = shape_of("acaca", 11);
  shape.sequences = 2;
  shape.pages = kLayers * 26;
  const auto other = tiny_engine(tiny_model(shape));
  PrefixCache found(*other);
  generate(*other, {request_of(token_ids(180, 7), 3, 0), request_of(token_ids(180, 8), 3, 0)},
           &found);
  CHECK_THROWS_AS(found.load(kPath, cancel), std::runtime_error);
  const auto [tokens, metadata] = found.load(kPath);
  CHECK(tokens == Ids(all.begin(), all.end() - 1));
  CHECK(metadata == "{\"a\": 1}");
  const Result again = generate(*other, {request_of(all, 8, 0)}, &found);
  CHECK(again.prefill_tokens[0] == 1);
  CHECK(again.tokens == generate(*engine, {request_of(all, 8, 0)}, nullptr).tokens);
  found.clear();
  other->open(kContext);
  other->open(kContext);
  std::remove(kPath.c_str());
}

TEST_CASE("files of other weights, longer contexts and broken ones are refused") {
  const TinyModel model = tiny_model(shape_of());
  const auto engine = tiny_engine(model);
  PrefixCache prefixes(*engine);
  const Ids prompt = token_ids(90, 1);
  generate(*engine, {request_of(prompt, 1, 0)}, &prefixes);
  prefixes.save(prompt, kPath);
  const auto refused = [&](const TinyModel& where, helm::ErrorKind kind, const char* what) {
    const auto another = tiny_engine(where);
    PrefixCache cache(*another);
    try {
      cache.load(kPath);
      FAIL("no error was thrown");
    } catch (const helm::Error& error) {
      CHECK(error.kind() == kind);
      CHECK(std::string(error.what()).find(what) != std::string::npos);
    }
    CHECK(cache.kept() == 0);
    check_all_free(*another);
  };
  TinyModel tuned = tiny_model(shape_of());  // its own copy of the data
  for (float& weight : *tuned.tensors.at("block.1.down").data) weight += 1e-3F;
  refused(tuned, helm::ErrorKind::kInvalid, "weights");
  refused(model.with("/model/fingerprint", "\"1\""), helm::ErrorKind::kInvalid, "another model");
  {
    const auto another = tiny_engine(model.with("/limits/context", "80"));
    CHECK_THROWS_WITH_AS(PrefixCache(*another).load(kPath),
                         doctest::Contains("90 positions, the context has 80"), helm::Error);
  }
  std::FILE* file = std::fopen(kPath.c_str(), "r+b");
  REQUIRE(file != nullptr);
  std::fseek(file, 0, SEEK_END);
  const int64_t bytes = std::ftell(file);
  std::fclose(file);
  REQUIRE(truncate(kPath.c_str(), bytes - 1) == 0);
  refused(model, helm::ErrorKind::kInvalid, "damaged");
  REQUIRE(truncate(kPath.c_str(), 12) == 0);
  refused(model, helm::ErrorKind::kInvalid, "too short");
  std::remove(kPath.c_str());
  refused(model, helm::ErrorKind::kIo, "cannot read");
}
