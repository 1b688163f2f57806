// The checksum against the values that its authors publish, and at every length around its blocks.
#include "base/xxh64.h"

#include <doctest/doctest.h>

#include <set>
#include <string>
#include <string_view>

namespace {

uint64_t hash(std::string_view text, uint64_t seed = 0) {
  return helm::xxh64(std::as_bytes(std::span(text)), seed);
}

}  // namespace

TEST_CASE("XXH64 gives the published values") {
  CHECK(hash("") == 0xEF46DB3751D8E999U);
  CHECK(hash("a") == 0xD24EC4F1A98C6E5BU);
  CHECK(hash("abc") == 0x44BC2CF5AD770999U);
  CHECK(hash("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1U);
}

TEST_CASE("XXH64 tells every changed byte, length and seed") {
  for (size_t length = 0; length <= 100; ++length) {
    const std::string text(length, 'x');
    std::set<uint64_t> seen = {hash(text), hash(text, 1), hash(text + 'x')};
    for (size_t i = 0; i < length; ++i) {
      std::string changed = text;
      changed[i] = 'y';
      seen.insert(hash(changed));
    }
    CHECK(seen.size() == length + 3);
  }
}

TEST_CASE("XXH64 of pieces is that of the whole") {
  std::string text;
  for (int i = 0; i < 150; ++i) text += static_cast<char>('a' + i * i % 23);
  const auto bytes = std::as_bytes(std::span(text));
  for (size_t first = 0; first <= 70; ++first) {
    for (size_t second = 0; first + second <= text.size(); second += 7) {
      helm::Xxh64 hash(3);
      hash.add(bytes.first(first));
      hash.add(bytes.subspan(first, second));
      hash.add(bytes.subspan(first + second));
      CHECK(hash.value() == helm::xxh64(bytes, 3));
    }
  }
}
