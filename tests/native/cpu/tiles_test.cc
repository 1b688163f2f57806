// The amx tier where the processor may lack it: what its tile registers compute, and that the
// tier's machine code does the same as its products in plain C++.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/workspace.h"
#include "oracle.h"
#include "support/check.h"
#include "tiers.h"
#include "tile_registers.h"
#include "tile_tables.h"

namespace helm::test {
namespace {

// So many rows and bytes of all registers, but of B as many rows as A has words.
TileRegisters configured(int rows, int row_bytes, int a_row_bytes) {
  unsigned char shapes[64] = {1};
  for (int i = 0; i < TileRegisters::kCount; ++i) {
    shapes[16 + 2 * i] = static_cast<unsigned char>(i == 1 ? a_row_bytes : row_bytes);
    shapes[48 + i] = static_cast<unsigned char>(i == 2 ? a_row_bytes / 4 : rows);
  }
  TileRegisters tiles;
  tiles.configure(shapes);
  return tiles;
}

// C += A B with one row, one column and one pair of k.
float product(float c, const float (&a)[2], const float (&b)[2]) {
  TileRegisters tiles = configured(1, 4, 4);
  const uint16_t left[] = {encode_bf16(a[0]), encode_bf16(a[1])};
  const uint16_t right[] = {encode_bf16(b[0]), encode_bf16(b[1])};
  tiles.load(0, &c, 0);
  tiles.load(1, left, 0);
  tiles.load(2, right, 0);
  tiles.dot(0, 1, 2);
  tiles.store(0, &c, 0);
  return c;
}

}  // namespace

TEST_CASE("tiles: products of integers are exact in every shape") {
  for (int rows : {1, 3, 16}) {
    for (int columns : {1, 5, 16}) {
      for (int pairs : {1, 7, 16}) {
        TileRegisters tiles = configured(rows, 4 * columns, 4 * pairs);
        uint16_t a[16][32], b[16][16][2];
        float c[16][16];
        const auto left = [](int m, int k) { return (m * 5 + k * 3) % 17 - 8; };
        const auto right = [](int k, int n) { return (k * 7 + n) % 13 - 6; };
        for (int m = 0; m < 16; ++m) {
          for (int k = 0; k < 32; ++k) a[m][k] = encode_bf16(static_cast<float>(left(m, k)));
          for (int n = 0; n < 16; ++n) {
            c[m][n] = static_cast<float>(m - n);
            for (int half = 0; half < 2; ++half) {
              b[m][n][half] = encode_bf16(static_cast<float>(right(2 * m + half, n)));
            }
          }
        }
        tiles.load(0, c, sizeof c[0]);
        tiles.load(1, a, sizeof a[0]);
        tiles.load(2, b, sizeof b[0]);
        tiles.dot(0, 1, 2);
        tiles.store(0, c, sizeof c[0]);
        for (int m = 0; m < 16; ++m) {
          for (int n = 0; n < 16; ++n) {
            int want = m - n;  // untouched outside the shape
            for (int k = 0; k < 2 * pairs && m < rows && n < columns; ++k) {
              want += left(m, k) * right(k, n);
            }
            CHECK(c[m][n] == static_cast<float>(want));
          }
        }
      }
    }
  }
}

TEST_CASE("tiles: even and odd elements are summed apart, denormals are zero") {
  const float small = std::ldexp(1.0f, -12);  // its square vanishes beside 1, twice that does not
  CHECK(product(1, {small, 0}, {small, 0}) == 1.0f);
  CHECK(product(1, {small, small}, {small, small}) == 1.0f + std::ldexp(1.0f, -23));
  const float tiny = std::ldexp(1.0f, -127);
  CHECK(product(0, {tiny, 0}, {1e30f, 0}) == 0.0f);
  CHECK(product(tiny, {0, 0}, {0, 0}) == 0.0f);
  CHECK(std::isnan(product(0, {INFINITY, 0}, {0, 0})));
}

TEST_CASE("tiles: what the processor refuses is refused") {
  TileRegisters tiles;
  float c = 0;
  CHECK_THROWS_AS(tiles.load(0, &c, 0), std::logic_error);
  tiles = configured(1, 4, 8);
  CHECK_THROWS_AS(tiles.dot(0, 1, 3), std::logic_error);
  tiles.release();
  CHECK_THROWS_AS(tiles.store(0, &c, 0), std::logic_error);
}

TEST_CASE("tiles: scratch fits what a plan counts") {
  CHECK(emulated_amx().scratch_bytes(1) <= 1 << 20);
  CHECK(emulated_amx().scratch_bytes(0) <= cpu::most_scratch_bytes(0));
}

TEST_CASE("tiles: machine code and plain C++ give the same bits") {
  const cpu::KernelTable* compiled = trapped_amx();
  if (compiled == nullptr) {
    MESSAGE("skipped: takes a processor with AVX512_BF16 and without tiles, and a build with both");
    return;
  }
  uint32_t seed = 700;
  for (int64_t tokens : {1, 2, 16, 17, 32, 50, 64, 65, 97}) {
    for (int64_t rows : {1, 16, 33, 48, 70}) {
      for (int64_t cols : {1, 31, 64, 97, 600}) {
        const int64_t a_stride = cols + 3, c_stride = rows + 3;
        const Guarded<float> a(random_floats((tokens - 1) * a_stride + cols, ++seed, Fill::kLarge));
        const Guarded<unsigned char> w(
            encode(DType::kBF16, random_floats(rows * cols, seed, Fill::kCancelling)));
        const Guarded<float> bias(random_floats(rows, seed));
        const std::vector<float> before = random_floats((tokens - 1) * c_stride + rows, seed);
        std::vector<float> results[2];
        for (int i = 0; i < 2; ++i) {
          const cpu::KernelTable& table = i == 0 ? *compiled : emulated_amx();
          const Scratch scratch(table, 64);
          const Guarded<float> c(before);
          table.matmul[index_of(DType::kBF16)]({a.data(), a_stride, tokens, w.data(), rows, cols,
                                                bias.data(), true, c.data(), c_stride,
                                                scratch.data()});
          CHECK((scratch.intact() && c.intact()));
          CHECK(!tile_registers().configured());
          results[i] = c.copy();
        }
        CHECK(compare_bits(results[0], results[1], "tokens " + std::to_string(tokens)) == "");
      }
    }
  }
}

}  // namespace helm::test
