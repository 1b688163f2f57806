// Sequences that share their first positions: each goes on as if it were alone, on every placement;
// pages are counted once and come back.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::Engine;
using helm::SequenceId;
using helm::StepInput;
using helm::test::tiny_engine;
using helm::test::tiny_model;
using helm::test::TinyCut;
using helm::test::TinyShape;
using helm::test::token_ids;

constexpr int64_t kLayers = 3;
constexpr int64_t kContext = 200;

TinyShape shape_of(const std::string& units, int64_t blocks, int64_t slots) {
  TinyShape shape;
  shape.layers = kLayers;
  shape.context = kContext;
  shape.sequences = 4;
  shape.step_tokens = 32;
  int64_t own = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    shape.devices.push_back(units[i] == 'a' ? "accelerator" : "cpu");
    own += units[i] == 'a' && i > 0 && i + 1 < units.size();
  }
  shape.pages = kLayers * blocks;
  shape.accelerator_pages = own * std::min(slots, blocks);
  return shape;
}

// The same with heads that can be cut; as two entries of KV where `cuts` says so.
TinyShape cut_shape(const std::string& units, int64_t blocks, std::vector<TinyCut> cuts) {
  TinyShape shape = shape_of(units, blocks, blocks);
  shape.inter = 72;
  shape.heads = 6;
  shape.kv_heads = 3;
  shape.head_dim = 16;
  shape.cuts = std::move(cuts);
  return shape;
}

std::vector<float> feed(Engine& engine, SequenceId sequence, std::span<const int32_t> ids) {
  std::vector<float> last;
  engine.forward(sequence, ids, StepInput::Outputs::kLast,
                 [&](std::span<const float> row) { last.assign(row.begin(), row.end()); });
  return last;
}

// A sequence under test and the tokens that it holds.
struct Live {
  SequenceId id;
  std::vector<int32_t> ids;
};

}  // namespace

TEST_CASE("sequences that fork, grow, shrink and close in any order stay independent") {
  const std::vector<TinyCut> whole, cuts = {{1, 32}, {2, 64, false}, {0, 32}};
  for (const auto& [units, blocks, slots, dtype, cut] : {std::tuple{"ccccc", 40, 0, "f32", whole},
                                                         {"ccaaa", 40, 40, "f32", whole},
                                                         {"ccaaa", 40, 12, "f32", whole},
                                                         {"acaca", 30, 11, "f32", whole},
                                                         {"acaca", 30, 30, "i8", whole},
                                                         {"cccac", 30, 30, "f32", cuts},
                                                         {"cccac", 30, 30, "i8", cuts}}) {
    CAPTURE(std::string(units));
    CAPTURE(slots);
    CAPTURE(cut.size());
    TinyShape shape = shape_of(units, blocks, slots);
    TinyShape plain{.layers = kLayers, .context = kContext};
    if (!cut.empty()) {
      shape = cut_shape(units, blocks, cut);
      plain = cut_shape("ccccc", 200, cut);  // in the same order of sums
      plain.cut_on_cpu = true;
    }
    plain.kv_dtype = shape.kv_dtype = dtype;
    const auto engine = tiny_engine(tiny_model(shape));
    const auto reference = tiny_engine(tiny_model(plain));
    std::mt19937 random(static_cast<uint32_t>(slots + 7));
    const auto below = [&](size_t n) { return static_cast<int64_t>(random() % n); };
    std::vector<Live> live;
    int forks = 0;
    for (int action = 0; action < (helm::test::kFew ? 50 : 300); ++action) {
      const int64_t kind = below(10);
      const auto pick = [&]() -> Live& { return live[static_cast<size_t>(below(live.size()))]; };
      try {
        if (live.empty() || (kind == 0 && live.size() < 4)) {
          live.push_back({engine->open(1 + below(kContext)), {}});
        } else if (kind <= 3 && live.size() < 4) {
          const Live source = pick();
          const int64_t length = below(source.ids.size() + 1);
          const int64_t capacity = std::max<int64_t>(length, 1) + below(60);
          const SequenceId id = engine->fork(source.id, length, std::min(capacity, kContext));
          live.push_back({id, {source.ids.begin(), source.ids.begin() + length}});
          forks += length > 0;
        } else if (kind <= 7) {
          Live& one = pick();
          const int64_t room = engine->capacity(one.id) - static_cast<int64_t>(one.ids.size());
          if (room == 0) continue;
          const auto more = token_ids(1 + below(static_cast<size_t>(std::min<int64_t>(room, 40))),
                                      static_cast<int32_t>(below(50)));
          const std::vector<float> got = feed(*engine, one.id, more);
          one.ids.insert(one.ids.end(), more.begin(), more.end());
          const SequenceId fresh = reference->open(kContext);
          const std::vector<float> want = feed(*reference, fresh, one.ids);
          reference->close(fresh);
          REQUIRE(got.size() == want.size());
          for (size_t i = 0; i < got.size(); ++i) {
            REQUIRE(std::abs(got[i] - want[i]) <= 1e-4F * (1 + std::abs(want[i])));
          }
        } else if (kind == 8) {
          Live& one = pick();
          const int64_t length = below(one.ids.size() + 1);
          engine->truncate(one.id, length);
          one.ids.resize(static_cast<size_t>(length));
        } else {
          const auto at = below(live.size());
          engine->close(live[static_cast<size_t>(at)].id);
          live.erase(live.begin() + at);
        }
      } catch (const helm::Error& error) {
        REQUIRE(error.kind() == helm::ErrorKind::kCapacity);  // and nothing has changed
      }
      for (const Live& one : live) {
        REQUIRE(engine->length(one.id) == static_cast<int64_t>(one.ids.size()));
      }
    }
    CHECK(forks > (helm::test::kFew ? 1 : 10));
    for (const Live& one : live) engine->close(one.id);
    // Every block is back: as many full sequences as ever fit.
    const int64_t most = std::min<int64_t>(4, blocks / 13);
    std::vector<SequenceId> full;
    for (int64_t i = 0; i < most; ++i) full.push_back(engine->open(kContext));
    for (const SequenceId id : full) engine->close(id);
  }
}

TEST_CASE("shared positions take no pages twice") {
  const auto engine = tiny_engine(tiny_model(shape_of("ccccc", 15, 0)));
  const SequenceId source = engine->open(160);  // 10 blocks
  feed(*engine, source, token_ids(150, 1));
  CHECK_THROWS_AS(engine->open(160), helm::Error);
  const SequenceId fork = engine->fork(source, 150, 160);
  const SequenceId other = engine->fork(source, 144, 192);
  CHECK_THROWS_AS(engine->fork(source, 0, 160), helm::Error);
  CHECK_THROWS_AS(engine->fork(source, 151, 160), helm::Error);
  CHECK_THROWS_AS(engine->fork(source, 50, 49), helm::Error);
  engine->close(source);
  CHECK(feed(*engine, fork, token_ids(10, 2)) ==
        feed(*engine, engine->fork(fork, 150, 160), token_ids(10, 2)));
  engine->close(fork);
  engine->close(other);
}

TEST_CASE(
    "a saved sequence goes on to the bit, whatever its cache holds and its last block lacks") {
  const std::string path = "helm-sharing-test.kv";
  for (const char* dtype : {"f32", "f16", "bf16", "i8"}) {
    for (const int64_t page_tokens : {1, 5, 16}) {  // of which 5 pads the rows of i8
      CAPTURE(std::string(dtype));
      CAPTURE(page_tokens);
      TinyShape shape = shape_of("ccccc", 200, 0);
      shape.kv_dtype = dtype;
      shape.page_tokens = page_tokens;
      shape.head_dim = 6;
      const auto engine = tiny_engine(tiny_model(shape));
      for (const int64_t length : {1, 33, 37, 48}) {
        CAPTURE(length);
        const auto ids = token_ids(length, 4);
        const SequenceId saved = engine->open(60);
        feed(*engine, saved, ids);
        engine->save(saved, ids, path);
        const SequenceId loaded = engine->load(path, 60).sequence;
        CHECK(feed(*engine, loaded, token_ids(3, 9)) == feed(*engine, saved, token_ids(3, 9)));
        engine->close(saved);
        engine->close(loaded);
      }
    }
  }
  std::remove(path.c_str());
}

TEST_CASE("files of KV have the model's heads, whatever entries hold them") {
  const std::string path = "helm-sharing-test.kv", again = "helm-sharing-again.kv";
  const auto content = [](const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const auto ids = token_ids(77, 4);
  const std::vector<TinyCut> most = {{1, 32}, {2, 64, false}, {1, 0}}, some = {{0, 32}, {1, 32}};
  for (const char* dtype : {"f32", "bf16", "i8"}) {
    for (const int64_t page_tokens : {5, 16}) {
      CAPTURE(std::string(dtype));
      CAPTURE(page_tokens);
      std::vector<std::unique_ptr<Engine>> engines;
      for (const std::vector<TinyCut>& cuts : {std::vector<TinyCut>(), most, some}) {
        TinyShape shape = cut_shape("ccacc", 60, cuts);
        shape.kv_dtype = dtype;
        shape.page_tokens = page_tokens;
        shape.qkv_bias = true;
        if (cuts.size() == most.size()) shape.cut_rows = 30;
        engines.push_back(tiny_engine(tiny_model(shape)));
      }
      for (const auto& saving : engines) {
        const SequenceId saved = saving->open(100);
        feed(*saving, saved, ids);
        saving->save(saved, ids, path);
        const std::vector<float> want = feed(*saving, saved, token_ids(3, 9));
        saving->close(saved);
        for (const auto& loading : engines) {
          const SequenceId loaded = loading->load(path, 100).sequence;
          loading->save(loaded, ids, again);
          CHECK(content(again) == content(path));
          const std::vector<float> got = feed(*loading, loaded, token_ids(3, 9));
          REQUIRE(got.size() == want.size());
          for (size_t i = 0; i < got.size(); ++i) {
            CHECK(std::abs(got[i] - want[i]) <= 1e-3F * (1 + std::abs(want[i])));
          }
          loading->close(loaded);
        }
      }
    }
  }
  std::remove(path.c_str());
  std::remove(again.c_str());
}

TEST_CASE("a saved sequence goes on where it was, on any placement") {
  const std::string path = "helm-sharing-test.kv";
  const auto ids = token_ids(117, 4);
  const auto more = token_ids(20, 9);
  std::vector<float> want;
  // Pages of any size take it up; the first size is that of the shape.
  for (const auto& [units, blocks, slots, page_tokens] : {std::tuple{"ccccc", 40, 0, 16},
                                                          {"ccaaa", 40, 40, 16},
                                                          {"acaca", 40, 11, 16},
                                                          {"ccccc", 80, 0, 8},
                                                          {"ccaaa", 130, 130, 5}}) {
    CAPTURE(std::string(units));
    CAPTURE(page_tokens);
    TinyShape paged = shape_of(units, blocks, slots);
    paged.page_tokens = page_tokens;
    const auto engine = tiny_engine(tiny_model(paged));
    if (want.empty()) {
      const SequenceId first = engine->open(kContext);
      feed(*engine, first, ids);
      engine->save(first, ids, path);
      want = feed(*engine, first, more);
    }
    const auto [loaded, tokens, metadata] = engine->load(path, kContext);
    CHECK(tokens == ids);
    CHECK(engine->length(loaded) == 117);
    engine->save(loaded, tokens, path);  // from wherever the pages lie now
    const std::vector<float> got = feed(*engine, loaded, more);
    REQUIRE(got.size() == want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      CHECK(std::abs(got[i] - want[i]) <= 1e-4F * (1 + std::abs(want[i])));
    }
  }
  const auto refused = [&](const TinyShape& shape, const char* what) {
    const auto engine = tiny_engine(tiny_model(shape));
    const SequenceId whole = engine->open(kContext);  // nothing is taken by what fails
    engine->close(whole);
    try {
      engine->load(path, kContext);
      FAIL("no error was thrown");
    } catch (const helm::Error& error) {
      CHECK(error.kind() == helm::ErrorKind::kInvalid);
      CHECK(std::string(error.what()).find(what) != std::string::npos);
    }
  };
  TinyShape shape = shape_of("ccccc", 40, 0);
  for (const char* dtype : {"f16", "i8"}) {
    shape.kv_dtype = dtype;
    refused(shape, "dtype");
  }
  shape.kv_dtype = "f32";
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  REQUIRE(file != nullptr);
  std::fseek(file, 0, SEEK_END);
  std::fputc('x', file);
  std::fclose(file);
  refused(shape, "damaged");
  std::remove(path.c_str());
}
