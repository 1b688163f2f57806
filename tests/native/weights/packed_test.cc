// Scales of packed matrices, every kind of them: one that is NaN or infinite is found wherever it
// stands, and nothing else is taken for one. Offsets are counted here by hand, from helm/tiles.h.
#include "weights/packed.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "helm/engine.h"
#include "support/check.h"

using namespace helm;
using helm::test::Guarded;

namespace {

constexpr int64_t kRows = 37, kCols = 288;

// A matrix of all codes whose scales are 0: no byte of a code is to be taken for one of a scale.
std::vector<std::byte> matrix_of(const Format& format) {
  std::vector<std::byte> bytes(static_cast<size_t>(format_bytes(format, kRows, kCols)));
  for (int64_t strip = 0; strip < 3; ++strip) {
    for (const auto& [col, n] :
         {std::pair<int64_t, int64_t>{0, 256}, {256, format.group > 32 ? format.group : 32}}) {
      std::byte* at = bytes.data() + strip * strip_bytes(format, kCols) +
                      strip_header_bytes(format) + (col == 0 ? 0 : span_bytes(format, 256));
      std::memset(at + span_header_bytes(format, n), 0xff,
                  static_cast<size_t>(span_bytes(format, n) - span_header_bytes(format, n)));
    }
  }
  return bytes;
}

std::string error_of(const Format& format, const std::byte* matrix) {
  PackedMatrix found("w", format, matrix, kRows, kCols);
  found.comes_from("x.safetensors");
  try {
    found.check_scales();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kIo);
    return error.what();
  }
  return "";
}

// Where the scales of row 33 (strip 2, row 1) and column 256 on lie in a matrix, and their sizes.
std::vector<std::pair<int64_t, int>> scales_of(const Format& format) {
  const int64_t strip = 2 * strip_bytes(format, kCols);
  const int64_t span = strip + strip_header_bytes(format) + span_bytes(format, 256);
  switch (format.scales) {
    case Scales::kS:
    case Scales::kZ:
      return {{span + 2, 2}};
    case Scales::kM:
      return {{span + 2, 2}, {span + 64 + 2, 2}};
    case Scales::kE:
      return {{span + 1, 1}};
    case Scales::kK:
      return {{span + 64 + 2, 2}};
    case Scales::kKM:
      return {{span + 128 + 2, 2}, {span + 128 + 32 + 2, 2}};
    case Scales::kR:
      return {{strip + 4, 4}};
    case Scales::kNone:
      break;
  }
  return {};
}

}  // namespace

TEST_CASE("a scale that is NaN or infinite is found in every packed format") {
  int formats = 0;
  for (const FormatRow& row : kFormats) {
    if (!is_packed(row.format)) continue;
    CAPTURE(row.name);
    const bool per_row = row.format.scales == Scales::kR;
    Guarded<std::byte> matrix(matrix_of(row.format));
    CHECK(error_of(row.format, matrix.data()) == "");
    for (const auto& [at, size] : scales_of(row.format)) {
      std::vector<uint32_t> bad = {0x7fc00000, 0x7f800000, 0xff800000};
      if (size == 2) bad = {0x7e00, 0x7c00, 0xfc00};
      if (size == 2 && row.format.wide) bad = {0x7fc0, 0x7f80, 0xff80};
      if (size == 1) bad = {255, 254};  // every code of the matrix is the largest
      for (const uint32_t bits : bad) {
        CAPTURE(bits);
        std::memcpy(matrix.data() + at, &bits, static_cast<size_t>(size));
        const std::string where =
            per_row ? "row 33, columns 0 to 255" : "row 33, columns 256 to 287";
        CHECK(error_of(row.format, matrix.data())
                  .find("x.safetensors: tensor \"w\" has a scale or a weight that is NaN or "
                        "infinite in " +
                        where) != std::string::npos);
        const uint32_t largest = size == 4         ? 0x7f7fffff
                                 : size == 1       ? 252
                                 : row.format.wide ? 0x7f7f
                                                   : 0x7bff;
        std::memcpy(matrix.data() + at, &largest, static_cast<size_t>(size));
        CHECK(error_of(row.format, matrix.data()) == "");
      }
      ++formats;
    }
    CHECK(matrix.intact());
  }
  CHECK(formats > 36);
}

TEST_CASE("an exponent is too large for some codes alone") {
  const Format format = format_from_name("mx4.e32");
  std::vector<std::byte> codes = matrix_of(format);  // all are -12, of row 33 then 1
  Guarded<std::byte> matrix(codes);
  const int64_t span = 2 * strip_bytes(format, kCols) + span_bytes(format, 256);
  matrix.data()[span + 1] = std::byte{254};
  CHECK(error_of(format, matrix.data()) != "");
  for (int64_t i = span + span_header_bytes(format, 32); i < span + span_bytes(format, 32); ++i) {
    if (i % 64 / 4 == 1) matrix.data()[i] = std::byte{0x11};
  }
  CHECK(error_of(format, matrix.data()) == "");
}
