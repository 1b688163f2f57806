// bf16 weights in 12 bits: every bit comes back, and products have the bits of those of plain
// weights.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <sstream>
#include <thread>

#include "cpu/compression.h"
#include "oracle.h"
#include "tiers.h"
#include "tile_tables.h"

namespace helm::test {
namespace {

enum class Rare { kNone, kFew, kSome, kAll };

// Normal numbers; of some weights, or all, any bits at all but, on request, infinities and NaN.
std::vector<uint16_t> random_weights(int64_t n, uint32_t seed, Rare rare, bool finite) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  std::vector<uint16_t> weights;
  for (int64_t i = 0; i < n; ++i) {
    uint16_t w = encode_bf16(normal(rng));
    if (rare == Rare::kAll || (rare == Rare::kSome && rng() % 100 == 0) ||
        (rare == Rare::kFew && rng() % 800 == 0)) {
      w = static_cast<uint16_t>(rng());
      if (rng() % 8 == 0) w &= 0x8000;                   // a zero
      if (finite && (w & 0x7f80) > 0x6000) w &= 0x9fff;  // no product overflows
    }
    weights.push_back(w);
  }
  return weights;
}

// A compressed matrix with room for as many escapes as there are weights, all parts guarded.
struct Matrix {
  Matrix(const cpu::KernelTable& table, const std::vector<uint16_t>& w, int64_t matrix_rows,
         int64_t matrix_cols)
      : rows(matrix_rows),
        cols(matrix_cols),
        plain(w),
        chunks(rows * cpu::compressed_row_bytes(cols)),
        headers(rows) {
    std::vector<cpu::Escape> all;
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<cpu::Escape> found(static_cast<size_t>(cols));
      uint8_t base = 255;
      const int64_t count = table.compress_row(
          plain.data() + r * cols, cols,
          reinterpret_cast<std::byte*>(chunks.data()) + r * cpu::compressed_row_bytes(cols), &base,
          found.data(), cols);
      headers.data()[r] = {static_cast<uint32_t>(all.size()),
                           static_cast<uint32_t>(count) << 8 | base};
      all.insert(all.end(), found.begin(), found.begin() + count);
    }
    escapes = std::make_unique<Guarded<cpu::Escape>>(all);
  }

  cpu::CompressedMatrix view() const {
    return {reinterpret_cast<const std::byte*>(chunks.data()), headers.data(), escapes->data(),
            cols};
  }
  bool intact() const {
    return plain.intact() && chunks.intact() && headers.intact() && escapes->intact();
  }

  int64_t rows, cols;
  Guarded<uint16_t> plain;
  Guarded<unsigned char> chunks;
  Guarded<cpu::CompressedRow> headers;
  std::unique_ptr<Guarded<cpu::Escape>> escapes;
};

std::vector<const cpu::KernelTable*> products() {
  std::vector<const cpu::KernelTable*> tables = tiers();
  tables.push_back(&emulated_amx());
  return tables;
}

// Products of a matrix, plain and compressed, and of its rows from `first` on.
void check_products(const Matrix& m, const cpu::KernelTable& table, int64_t tokens, int64_t first,
                    bool bias, uint32_t seed) {
  constexpr int kBf16 = static_cast<int>(DType::kBF16);
  const int64_t rows = m.rows - first, stride = rows + 3;
  const Guarded<float> a(random_floats(tokens * m.cols, seed));
  const Guarded<float> biases(random_floats(rows, seed + 1));
  const std::vector<float> before = random_floats((tokens - 1) * stride + rows, seed + 2);
  const Scratch scratch(table, 64);
  const int64_t tiles = cpu::tiles_to_pack(table, DType::kBF16, tokens);
  const auto words = tiles > 0 ? cpu::packed_bytes(tokens, m.cols) / 4 : 0;
  const Guarded<float> packed(std::vector<float>(static_cast<size_t>(words)));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    table.pack[kBf16]({a.data(), m.cols, tokens, m.cols, packed.data()}, tile);
  }
  const auto product = [&](bool compressed, bool same_input) {
    const Guarded<float> c(before);
    cpu::MatmulArgs args{
        a.data(), m.cols,   tokens, nullptr,       rows, m.cols, bias ? biases.data() : nullptr,
        bias,     c.data(), stride, scratch.data()};
    args.packed = packed.data();
    if (compressed) {
      args.slices = tokens <= cpu::kDecodeTokens ? 3 : 1;
      for (; args.slice < args.slices; ++args.slice) {
        args.same_input = same_input || args.slice > 0;
        table.matmul_compressed(args, m.view().from(first));
      }
    } else {
      args.w = m.plain.data() + first * m.cols;
      table.matmul[kBf16](args);
    }
    CHECK(c.intact());
    return c.copy();
  };
  std::ostringstream label;
  label << table.name << " tokens " << tokens << " rows " << rows << " cols " << m.cols << " bias "
        << bias << " escapes " << m.escapes->size() << " seed " << seed;
  const std::vector<float> own = product(true, false), stored = product(false, false);
  CHECK(compare_bits(own, stored, label.str()) == "");
  // What stored rows of the same dtype made of the input serves compressed ones.
  if (tokens <= cpu::kDecodeTokens) {
    CHECK(compare_bits(product(true, true), stored, label.str()) == "");
  }
  CHECK_MESSAGE((m.intact() && scratch.intact()), label.str());
}

}  // namespace

TEST_CASE(
    "compression: every weight comes back in every tier, of which all find the same escapes") {
  uint32_t seed = 1;
  for (Rare rare : {Rare::kNone, Rare::kFew, Rare::kSome, Rare::kAll}) {
    for (int64_t cols : {1, 63, 64, 65, 127, 128, 129, 1000, 4096}) {
      const std::vector<uint16_t> weights = random_weights(5 * cols, seed++, rare, false);
      const Matrix first(*cpu::kernels_scalar(), weights, 5, cols);
      for (const cpu::KernelTable* table : tiers()) {
        const Matrix m(*table, weights, 5, cols);
        CHECK(m.escapes->size() == first.escapes->size());
        std::vector<uint16_t> back(static_cast<size_t>(cols));
        for (int64_t r = 0; r < 5; ++r) {
          cpu::read_compressed(*table, m.view(), r, 0, cols, back.data());
          CHECK(std::memcmp(back.data(), weights.data() + r * cols, back.size() * 2) == 0);
          const int64_t from = cols / 3, n = cols - 2 * from;
          cpu::read_compressed(*table, m.view(), r, from, n, back.data());
          CHECK(std::memcmp(back.data(), weights.data() + r * cols + from,
                            static_cast<size_t>(n) * 2) == 0);
        }
      }
    }
  }
}

TEST_CASE("compression: few normal weights are escapes, and rows of one value have none") {
  const Matrix normal(*cpu::kernels_scalar(), random_weights(64 * 4096, 7, Rare::kNone, true), 64,
                      4096);
  CHECK(normal.escapes->size() < 64 * 4096 / 2000);
  for (uint16_t value : {0x0000, 0x8000, 0x0001, 0x7f80, 0xffff, 0x3f80}) {
    const std::vector<uint16_t> same(300, value);
    const Matrix m(*cpu::kernels_scalar(), same, 1, 300);
    CHECK(m.escapes->size() == 0);
    std::vector<uint16_t> back(300);
    cpu::read_compressed(*cpu::kernels_scalar(), m.view(), 0, 0, 300, back.data());
    CHECK(back == same);
  }
}

TEST_CASE("compression: products have the bits of plain weights'") {
  uint32_t seed = 100;
  for (const cpu::KernelTable* table : products()) {
    for (int64_t cols : {1, 20, 64, 100, 128, 190, 1025, 2048, 2049, 3100, 4500}) {
      const Rare rare = seed % 3 == 0 ? Rare::kNone : seed % 3 == 1 ? Rare::kSome : Rare::kAll;
      const Matrix m(*table, random_weights(37 * cols, seed, rare, true), 37, cols);
      for (int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 40, 97, 113}) {
        check_products(m, *table, tokens, seed % 5, seed % 2 == 0, seed);
        ++seed;
      }
    }
    const Matrix tall(*table, random_weights(261 * 70, seed, Rare::kSome, true), 261, 70);
    for (int64_t tokens : {1, 8, 70, 113}) check_products(tall, *table, tokens, 0, true, seed++);
    // Chunks with escapes among those without.
    const Matrix mixed(*table, random_weights(37 * 3100, seed, Rare::kFew, true), 37, 3100);
    for (int64_t tokens = 1; tokens < 10; ++tokens) {
      check_products(mixed, *table, tokens, 0, true, seed++);
    }
  }
}

TEST_CASE("compression: so have those of the amx tier's own code") {
  const cpu::KernelTable* table = trapped_amx();
  if (table == nullptr) return;  // the machine has tiles, and the case above was of them, or cannot
  uint32_t seed = 900;
  for (int64_t cols : {100, 2100}) {
    const Matrix m(*table, random_weights(37 * cols, seed, Rare::kSome, true), 37, cols);
    for (int64_t tokens : {1, 8, 70}) check_products(m, *table, tokens, 3, true, seed++);
  }
}

TEST_CASE("compression: rows come in any order and from several threads, escapes are counted") {
  constexpr int64_t kRows = 200, kCols = 640;
  const std::vector<uint16_t> weights = random_weights(kRows * kCols, 9, Rare::kNone, true);
  std::vector<std::byte> memory(static_cast<size_t>(cpu::CompressedMatrix::bytes(kRows, kCols)) +
                                64);
  auto* at =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  cpu::Compression compression(at, kRows, kCols);
  const auto put = [&](int64_t parity) {
    for (int64_t r = kRows - 1 - parity; r >= 0; r -= 2) {
      CHECK(compression.put(cpu::select_kernels(), r, weights.data() + r * kCols));
    }
  };
  std::thread other(put, 1);
  put(0);
  other.join();
  const auto view = cpu::CompressedMatrix::at(at, kRows, kCols);
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<uint16_t> back(kCols);
    cpu::read_compressed(cpu::select_kernels(), view, r, 0, kCols, back.data());
    CHECK(std::memcmp(back.data(), weights.data() + r * kCols, kCols * 2) == 0);
  }
  cpu::Compression full(at, kRows, kCols);
  const std::vector<uint16_t> hard = random_weights(kCols, 10, Rare::kAll, true);
  int64_t fitted = 0;
  while (fitted < kRows && full.put(cpu::select_kernels(), fitted, hard.data())) ++fitted;
  CHECK(fitted < 3);  // 564 escapes fit
}

}  // namespace helm::test
