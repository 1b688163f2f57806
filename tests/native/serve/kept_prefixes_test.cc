// What a prefix cache keeps: as much as a list of all prompts would find, more prefixes than
// sequences, blocks alone, windows as long as sequences leave them.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "helm/generation.h"
#include "helm/prefix_cache.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::PrefixCache;
using helm::SequenceId;
using helm::StepInput;
using helm::test::kAccelerator;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyShape;
using helm::test::token_ids;
using Ids = std::vector<int32_t>;

constexpr int64_t kPage = 8;
constexpr int64_t kContext = 96;

TinyShape shape_of(int64_t blocks, int64_t sequences = 2) {
  TinyShape shape;
  shape.page_tokens = kPage;
  shape.context = kContext;
  shape.threads = 1;
  shape.sequences = sequences;
  shape.pages = shape.layers * blocks;
  return shape;
}

TinyShape windowed(int64_t blocks, int64_t sequences, int64_t window = 17) {
  TinyShape shape = shape_of(blocks, sequences);
  shape.step_tokens = kPage;
  shape.window = window;
  shape.window_blocks = sequences * ((window + kPage - 3 + kPage) / kPage + 1);
  return shape;
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Computes what is not there of the tokens and returns their sequence; its last logits if asked.
PrefixCache::Opened compute(Engine& engine, PrefixCache& prefixes, const Ids& tokens,
                            std::vector<float>* last = nullptr) {
  const PrefixCache::Opened opened = prefixes.open(tokens, std::ssize(tokens));
  CHECK(engine.length(opened.sequence) == opened.cached);
  engine.forward(opened.sequence, std::span(tokens).subspan(static_cast<size_t>(opened.cached)),
                 StepInput::Outputs::kLast, [&](std::span<const float> row) {
                   if (last != nullptr) last->assign(row.begin(), row.end());
                 });
  return opened;
}

int64_t compute_and_keep(Engine& engine, PrefixCache& prefixes, const Ids& tokens) {
  const PrefixCache::Opened opened = compute(engine, prefixes, tokens);
  prefixes.keep(opened.sequence, tokens);
  return opened.cached;
}

void check_all_free(Engine& engine, int64_t blocks) {
  std::vector<SequenceId> all;
  for (int64_t left = blocks; left > 0; left -= kContext / kPage) {
    all.push_back(engine.open(kPage * std::min<int64_t>(left, kContext / kPage)));
  }
  CHECK(std::ssize(all) <= engine.plan().limits.sequences);
  for (const SequenceId id : all) engine.close(id);
}

}  // namespace

TEST_CASE("a prefix cache finds as much as a list of all that was computed") {
  const int64_t blocks = 380;  // as many as 32 sequences may need
  const auto engine = tiny_engine(tiny_model(shape_of(blocks, 32)));
  std::mt19937 random(5);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(n));
  };
  PrefixCache prefixes(*engine);
  std::vector<Ids> computed;
  int64_t found = 0;
  for (int call = 0; call < 150; ++call) {
    const Ids stem = token_ids(1 + below(60), static_cast<int32_t>(below(3)));
    const Ids prompt = joined(stem, token_ids(1 + below(30), static_cast<int32_t>(5 + below(4))));
    int64_t most = 0;
    bool whole = false;  // then any number pays
    for (const Ids& one : computed) {
      const int64_t shared = std::min(helm::common_prefix(one, prompt), std::ssize(prompt) - 1);
      whole |= shared >= most && shared == std::ssize(one);
      most = std::max(most, shared);
    }
    const int64_t cached = prefixes.find(prompt);
    CHECK(cached == compute_and_keep(*engine, prefixes, prompt));
    if (most >= PrefixCache::kLeastShared) {
      REQUIRE(cached == most);
    } else {
      REQUIRE((cached == 0 || (whole && cached == most)));
    }
    found += cached;
    computed.push_back(prompt);
  }
  CHECK(found > 1000);
  prefixes.clear();
  CHECK(prefixes.kept() == 0);
  check_all_free(*engine, blocks);
}

TEST_CASE("more prefixes are kept than there may be sequences, what they share once") {
  const int64_t blocks = 24;
  const auto engine = tiny_engine(tiny_model(shape_of(blocks)));
  PrefixCache prefixes(*engine);
  const Ids system = token_ids(5 * kPage, 1);
  for (int32_t i = 0; i < 8; ++i) {  // five blocks and one for each
    CHECK(compute_and_keep(*engine, prefixes, joined(system, token_ids(6, 20 + i))) ==
          (i == 0 ? 0 : std::ssize(system)));
  }
  CHECK(prefixes.kept() == 8);
  const SequenceId rest = engine->open((blocks - 13) * kPage);
  CHECK(!engine->can_open(1));
  for (int32_t i = 0; i < 8; ++i) {
    CHECK(prefixes.find(joined(joined(system, token_ids(6, 20 + i)), {3})) == 46);
  }
  // The last block of one that is gone on with needs no copy; a block more is one too many.
  const Ids next = joined(joined(system, token_ids(6, 20)), {3, 4});
  const auto opened = prefixes.try_open(next, 6 * kPage);
  REQUIRE(opened);
  CHECK(opened->cached == 46);
  CHECK(prefixes.kept() == 7);
  engine->close(rest);
  // A prompt that ends within what is kept of another copies its last block.
  CHECK(prefixes.find(joined(system, token_ids(4, 21))) == 43);
  const auto copies = prefixes.open(joined(system, token_ids(4, 21)), 6 * kPage);
  CHECK(copies.cached == 43);
  CHECK(prefixes.kept() == 7);
  prefixes.close(copies.sequence);
  prefixes.close(opened->sequence);
  prefixes.clear();
  check_all_free(*engine, blocks);
}

TEST_CASE("nothing is given up where that makes no room") {
  const auto engine = tiny_engine(tiny_model(shape_of(20)));
  PrefixCache prefixes(*engine);
  const Ids kept = token_ids(6 * kPage, 1);
  compute_and_keep(*engine, prefixes, kept);
  const SequenceId first = engine->open(8 * kPage);
  CHECK(!prefixes.try_open(token_ids(9, 2), 12 * kPage + 1));
  CHECK(!prefixes.try_open(token_ids(9, 2), 12 * kPage, 1));
  CHECK(prefixes.find(kept) == std::ssize(kept) - 1);
  const auto opened = prefixes.try_open(token_ids(9, 2), 9 * kPage);  // three of the kept blocks
  REQUIRE(opened);
  CHECK(prefixes.find(kept) == 3 * kPage);
  CHECK(!prefixes.try_open(token_ids(9, 2), kPage));  // a third sequence
  CHECK(prefixes.find(kept) == 3 * kPage);
  engine->close(first);
  prefixes.close(opened->sequence);
}

TEST_CASE("windows are kept as long as sequences leave them, and go with who goes on") {
  const int64_t blocks = 60, sequences = 4;
  for (const int64_t window : {9, 17}) {
    CAPTURE(window);
    const auto engine = tiny_engine(tiny_model(windowed(blocks, sequences, window)));
    TinyShape ample = shape_of(blocks, sequences);
    ample.window = window;
    const auto reference = tiny_engine(tiny_model(ample));
    PrefixCache prefixes(*engine);
    // Each goes on where it ended; the first ones of eight have made way for others' windows.
    std::vector<Ids> talks;
    for (int32_t i = 0; i < 8; ++i) {
      talks.push_back(token_ids(43, i));
      CHECK(compute_and_keep(*engine, prefixes, talks.back()) == 0);
    }
    for (size_t i = 0; i < 3; ++i) CHECK(prefixes.find(joined(talks[i], {1})) < 43);
    for (size_t i = 5; i < 8; ++i) {
      const Ids next = joined(talks[i], token_ids(6, 9));
      std::vector<float> got, want;
      const auto opened = compute(*engine, prefixes, next, &got);
      CHECK(opened.cached == 43);
      PrefixCache none(*reference);
      const auto fresh = compute(*reference, none, next, &want);
      none.close(fresh.sequence);
      CHECK(got == want);
      prefixes.keep(opened.sequence, next);
      CHECK(prefixes.find(joined(next, {1})) == 49);
      CHECK(prefixes.find(joined(token_ids(20, static_cast<int32_t>(i)), {1})) == 0);
    }
    // All sequences at once: no page of windows is left to what is kept.
    std::vector<SequenceId> open;
    for (int64_t i = 0; i < sequences; ++i) {
      open.push_back(prefixes.open(token_ids(3, static_cast<int32_t>(30 + i)), kPage).sequence);
    }
    for (const Ids& talk : talks) CHECK(prefixes.find(joined(talk, {1})) == 0);
    for (const SequenceId id : open) prefixes.close(id);
    compute_and_keep(*engine, prefixes, talks[0]);
    compute_and_keep(*engine, prefixes, talks[1]);
    for (int64_t i = 0; i < 2; ++i) open[static_cast<size_t>(i)] = engine->open(kPage);
    CHECK_THROWS_WITH_AS(engine->open(kPage), doctest::Contains("pages of layers with a window"),
                         helm::Error);
    prefixes.clear();
    for (int64_t i = 0; i < 2; ++i) engine->close(open[static_cast<size_t>(i)]);
    check_all_free(*engine, sequences * kContext / kPage);
  }
}

TEST_CASE("calls with blocks that cannot be begun with are refused, and nothing changes") {
  const auto engine = tiny_engine(tiny_model(shape_of(20)));
  const Ids tokens = token_ids(20, 1);
  const SequenceId first = engine->open(24);
  engine->forward(first, tokens, StepInput::Outputs::kNone, [](std::span<const float>) {});
  CHECK_THROWS_AS(engine->blocks(first, 21), helm::Error);
  CHECK_THROWS_AS(engine->detach(first, 21), helm::Error);
  CHECK_THROWS_AS(engine->detach(first, -1), helm::Error);
  CHECK(engine->length(first) == 20);
  std::vector<helm::HeldBlock> held = engine->detach(first, 20);
  CHECK_THROWS_AS(engine->length(first), helm::Error);
  REQUIRE(held.size() == 3);
  CHECK_THROWS_AS(engine->open(24, {held, 25}), helm::Error);
  CHECK_THROWS_AS(engine->open(24, {held, 16}), helm::Error);
  CHECK_THROWS_AS(engine->open(19, {held, 20}), helm::Error);
  std::vector<helm::HeldBlock> unknown = {{7}};
  CHECK_THROWS_WITH_AS(engine->open(24, {unknown, 8}),
                       doctest::Contains("nobody holds a KV block 7"), helm::Error);
  CHECK_THROWS_AS(engine->release(unknown), helm::Error);
  CHECK_THROWS_AS(engine->save(held, token_ids(16, 1), "unwritten.kv"), helm::Error);
  CHECK(engine->usable(held, 20) == 20);
  engine->release(held);
  check_all_free(*engine, 20);
}

TEST_CASE("what is kept leaves the accelerator as it is, and what others have is given up") {
  const int64_t blocks = 56, slots = 20;
  TinyShape shape = shape_of(blocks, 3);
  shape.step_tokens = 3 * kPage;
  shape.devices.assign(static_cast<size_t>(shape.layers) + 2, "accelerator");
  shape.accelerator_pages = shape.layers * slots;
  shape.overflow = "cpu";
  shape.watermark = 1;
  const auto engine = tiny_engine(tiny_model(shape), kAccelerator);
  const auto on_cpu = tiny_engine(tiny_model(shape_of(blocks, 3)));
  PrefixCache prefixes(*engine), reference(*on_cpu);
  const Ids first = token_ids(5 * kPage, 1), second = token_ids(5 * kPage, 2);
  compute_and_keep(*engine, prefixes, first);
  compute_and_keep(*engine, prefixes, second);
  CHECK(!engine->stats().evicted_blocks);
  REQUIRE(prefixes.leave_near());  // what was used least recently
  CHECK(engine->stats().evicted_blocks == 5);
  REQUIRE(prefixes.leave_near());
  CHECK(engine->stats().evicted_blocks == 10);
  CHECK(!prefixes.leave_near());
  CHECK(prefixes.kept() == 2);
  for (const Ids& kept : {first, second}) {
    const Ids prompt = joined(kept, token_ids(5, 9));
    std::vector<float> got, want;
    const PrefixCache::Opened opened = compute(*engine, prefixes, prompt, &got);
    CHECK(opened.cached == std::ssize(kept));
    prefixes.close(opened.sequence);
    reference.close(compute(*on_cpu, reference, prompt, &want).sequence);
    CHECK(got == want);
  }
  const Ids third = token_ids(5 * kPage, 3);
  compute_and_keep(*engine, prefixes, third);
  const PrefixCache::Opened running = prefixes.open(joined(third, token_ids(5, 9)), kContext);
  CHECK(running.cached == std::ssize(third));
  int64_t given_up = 0;
  while (prefixes.leave_near()) ++given_up;
  CHECK(given_up == 5);
  CHECK(engine->stats().evicted_blocks == 10);
  CHECK(engine->length(running.sequence) == std::ssize(third));
  prefixes.close(running.sequence);
  prefixes.clear();
  CHECK(engine->can_open(kContext, blocks - kContext / kPage));
}
