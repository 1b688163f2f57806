// The table of formats, and the bytes of packed matrices: sizes as in tests/data/format_bytes.json.
#include <doctest/doctest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "base/json_reader.h"
#include "cpu/kernels/compressed.h"
#include "helm/tiles.h"

using namespace helm;

namespace {

std::string text_of(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_CASE("sizes and units are those of the vectors") {
  const JsonDocument document(text_of(HELM_TEST_DATA "/format_bytes.json"), "vectors", "no JSON");
  const JsonReader cases = document.root()["formats"];
  constexpr int64_t kMost = INT64_MAX;
  REQUIRE(cases.size() == std::size(kFormats));
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string name = cases[i]["format"].string();
    CAPTURE(name);
    CHECK(name == kFormats[i].name);
    const Format format = format_from_name(name);
    CHECK(format == kFormats[i].format);
    CHECK(name == format_name(format));
    CHECK(row_unit(format) == cases[i]["row_unit"].integer(1, kMost));
    CHECK(col_unit(format) == cases[i]["col_unit"].integer(1, kMost));
    const JsonReader sizes = cases[i]["sizes"];
    const auto number = [&](size_t j, size_t k) { return sizes[j][k].integer(1, kMost); };
    REQUIRE(sizes.size() > 0);
    for (size_t j = 0; j < sizes.size(); ++j) {
      const int64_t rows = number(j, 0), cols = number(j, 1);
      CAPTURE(rows);
      CAPTURE(cols);
      CHECK(format_bytes(format, rows, cols) == number(j, 2));
      CHECK(read_bytes(format, rows, cols) == number(j, 3));
    }
  }
}

TEST_CASE("bf16c has the size of the kernels' compressed matrices") {
  const Format bf16c = format_from_name("bf16c");
  for (const int64_t cols : {int64_t{1}, int64_t{127}, int64_t{128}, int64_t{1000}}) {
    for (const int64_t rows : {int64_t{1}, int64_t{77}}) {
      CHECK(format_bytes(bf16c, rows, cols) == cpu::CompressedMatrix::bytes(rows, cols));
      CHECK(read_bytes(bf16c, rows, cols) == cpu::CompressedMatrix::read_bytes(rows, cols));
    }
  }
  CHECK(format_takes(bf16c, cpu::kMostCompressedCols));
  CHECK(!format_takes(bf16c, cpu::kMostCompressedCols + 1));
}

TEST_CASE("an unknown name is refused with those that exist") {
  for (const char* name : {"", "c4", "c4.s31", "C4.S32", "c8.r0"}) {
    try {
      format_from_name(name);
      FAIL("no format is called " << name);
    } catch (const Error& error) {
      const std::string message = error.what();
      CHECK(error.kind() == ErrorKind::kInvalid);
      CHECK(message.find('"' + std::string(name) + "\"; known: f32, f16, ") != std::string::npos);
      CHECK(message.find("c4.km32") != std::string::npos);
    }
  }
  CHECK(std::string(format_name({Codes::kC4, Scales::kE, 16})) == "?");
}

// Every bit of a block belongs to one code, and each code has as many as its format says.
TEST_CASE("the codes of a block fill it, and do not overlap") {
  for (const Codes codes : {Codes::kC4, Codes::kC5, Codes::kC6, Codes::kC8, Codes::kNL4}) {
    const int bits = row_of(codes).bits;
    CAPTURE(row_of(codes).name);
    std::vector<uint8_t> block(static_cast<size_t>(bits * kFormatLine));
    std::set<int> taken;
    const auto take = [&](const CodeBits& some) {
      for (int b = 0; b < some.count; ++b) taken.insert(some.byte * 8 + some.shift + b);
    };
    for (int r = 0; r < kStripRows; ++r) {
      for (int k = 0; k < kBlockCols; ++k) {
        take(low_bits(codes, r, k));
        take(plane_bits(codes, r, k));
        write_code(codes, block.data(), r, k, r * 37 + k * 11);
      }
    }
    CHECK(taken.size() == block.size() * 8);
    CHECK(*taken.rbegin() == static_cast<int>(block.size()) * 8 - 1);
    for (int r = 0; r < kStripRows; ++r) {
      for (int k = 0; k < kBlockCols; ++k) {
        CHECK(read_code(codes, block.data(), r, k) == ((r * 37 + k * 11) & ((1 << bits) - 1)));
      }
    }
  }
}

TEST_CASE("lines lie where the figures of helm/tiles.h say") {
  CHECK(low_bits(Codes::kC8, 3, 9).byte == 2 * 64 + 4 * 3 + 1);
  const CodeBits high = low_bits(Codes::kC4, 5, 16 + 4 * 2 + 3);
  CHECK((high.byte == 2 * 64 + 4 * 5 + 3 && high.shift == 4 && high.count == 4));
  const CodeBits fifth = plane_bits(Codes::kC5, 15, 4 * 6 + 1);
  CHECK((fifth.byte == 256 + 61 && fifth.shift == 6 && fifth.count == 1));
  const CodeBits top = plane_bits(Codes::kC6, 2, 16 + 4 * 3);
  CHECK((top.byte == 256 + 64 + 8 && top.shift == 6 && top.count == 2));
}

// Headers by hand: km32 of 256 columns is l, n (128 bytes each) and a line of d and e.
TEST_CASE("the parts of a span follow each other") {
  const Format km = format_from_name("c4.km32"), z = format_from_name("c4.z128"),
               r = format_from_name("c8.r"), k16 = format_from_name("c6.k16");
  CHECK(group_array_at(km, 256, 1) == 128);
  CHECK(span_array_at(km, 256, 0) == 256);
  CHECK(span_array_at(km, 256, 1) == 288);
  CHECK(block_at(km, 256, 0) == 320);
  CHECK(block_at(km, 256, 64) == 320 + 2 * 256);
  CHECK(group_array_at(z, 256, 1) == 64);
  CHECK(block_at(z, 256, 0) == 128);
  CHECK(span_at(r, 256) == 64 + 256 * 16);
  CHECK(span_array_at(k16, 256, 0) == 256);
  CHECK(span_bytes(k16, 256) == 320 + 256 * 16 * 6 / 8);
  CHECK(padded_cols(z, 130) == 256);
  CHECK(span_cols(km, 600, 512) == 96);
  CHECK(strip_at(km, 600, 2) == 2 * (2 * span_bytes(km, 256) + span_bytes(km, 96)));
  CHECK(span_at(km, 512) + span_bytes(km, 96) == strip_bytes(km, 600));
}

}  // namespace
