// C(t, r) = [C] + [bias] + sum_k A(t, k) W(r, k): values, edges, and bits independent of the split.
#include <doctest/doctest.h>

#include <algorithm>
#include <sstream>

#include "oracle.h"
#include "tiers.h"
#include "tile_tables.h"

namespace helm::test {
namespace {

// The tiers, and the amx tier's products in plain C++.
std::vector<const cpu::KernelTable*> products(DType dtype) {
  std::vector<const cpu::KernelTable*> tables = tiers();
  if (dtype == DType::kBF16) tables.push_back(&emulated_amx());
  return tables;
}

struct Problem {
  int64_t tokens, rows, cols;
  bool bias = false, accumulate = false;
  Fill fill = Fill::kSigned;
};

// Inputs of one problem, each ending at an unreadable page, rows of A and C padded by three.
struct Data {
  Data(const Problem& p, DType dtype, uint32_t seed)
      : a_stride(p.cols + 3),
        c_stride(p.rows + 3),
        a(random_floats((p.tokens - 1) * a_stride + p.cols, seed, p.fill)),
        w(encode(dtype, random_floats(p.rows * p.cols, seed + 1, p.fill))),
        bias(random_floats(p.rows, seed + 2)),
        c(random_floats((p.tokens - 1) * c_stride + p.rows, seed + 3)) {}
  int64_t a_stride, c_stride;
  Guarded<float> a;
  Guarded<unsigned char> w;
  Guarded<float> bias, c;
};

cpu::MatmulArgs args_of(const Problem& p, const Data& d, const Scratch& scratch) {
  return {d.a.data(),
          d.a_stride,
          p.tokens,
          d.w.data(),
          p.rows,
          p.cols,
          p.bias ? d.bias.data() : nullptr,
          p.accumulate,
          d.c.data(),
          d.c_stride,
          scratch.data()};
}

// Packs A first, tile by tile from the last on, where the table wants it.
void multiply(const cpu::KernelTable& table, DType dtype, cpu::MatmulArgs args) {
  const int64_t tiles = cpu::tiles_to_pack(table, dtype, args.tokens);
  const auto bytes = static_cast<size_t>(tiles > 0 ? cpu::packed_bytes(args.tokens, args.cols) : 0);
  const Guarded<float> packed(std::vector<float>(bytes / sizeof(float)));
  for (int64_t tile = tiles - 1; tile >= 0; --tile) {
    table.pack[index_of(dtype)]({args.a, args.a_stride, args.tokens, args.cols, packed.data()},
                                tile);
  }
  args.packed = packed.data();
  table.matmul[index_of(dtype)](args);
  CHECK(packed.intact());
}

std::string label_of(const cpu::KernelTable& table, DType dtype, const Problem& p, uint32_t seed) {
  std::ostringstream s;
  s << table.name << " matmul dtype " << index_of(dtype) << " tokens " << p.tokens << " rows "
    << p.rows << " cols " << p.cols << " bias " << p.bias << " accumulate " << p.accumulate
    << " fill " << static_cast<int>(p.fill) << " seed " << seed;
  return s.str();
}

// [tokens, rows] out of C; the padding between rows must be what it was.
std::vector<float> result_of(const Problem& p, const Data& d, const std::vector<float>& before) {
  std::vector<float> out;
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t r = 0; r < (t + 1 < p.tokens ? d.c_stride : p.rows); ++r) {
      const size_t i = static_cast<size_t>(t * d.c_stride + r);
      if (r < p.rows) {
        out.push_back(d.c.data()[i]);
      } else {
        CHECK(d.c.data()[i] == before[i]);
      }
    }
  }
  return out;
}

void check_problem(const Problem& p, uint32_t seed) {
  for (DType dtype : kAllTypes) {
    for (const cpu::KernelTable* table : products(dtype)) {
      const Data d(p, dtype, seed);
      const Scratch scratch(*table, 64);
      const std::vector<float> before = d.c.copy();
      const cpu::MatmulArgs args = args_of(p, d, scratch);
      const Expected want = oracle_matmul(args, dtype, before, table->activations[index_of(dtype)]);
      multiply(*table, dtype, args);
      const std::string label = label_of(*table, dtype, p, seed);
      CHECK(compare(result_of(p, d, before), want.value, want.bound, label) == "");
      CHECK_MESSAGE((d.a.intact() && d.w.intact() && d.c.intact() && scratch.intact()), label);
    }
  }
}

}  // namespace

TEST_CASE("matmul: ragged columns") {
  uint32_t seed = 100;
  for (int64_t cols : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 61, 511, 512, 513, 1027}) {
    for (int64_t tokens : {1, 3, 11, 33, 67, 101}) check_problem({tokens, 5, cols}, seed++);
  }
}

TEST_CASE("matmul: every token count and ragged rows") {
  uint32_t seed = 200;
  for (int64_t tokens = 1; tokens <= 110; ++tokens) check_problem({tokens, 13, 37}, seed++);
  for (int64_t rows : {1, 3, 8, 15, 17, 31, 33, 48, 128, 129, 257, 513}) {
    for (int64_t tokens : {1, 2, 8, 13, 35, 71, 107}) check_problem({tokens, rows, 19}, seed++);
  }
}

TEST_CASE("matmul: long rows of one token, in tiles of their own") {
  uint32_t seed = 250;
  for (int64_t rows : {1, 7, 8, 9, 31}) {
    for (int64_t cols : {2048, 2049, 3100}) check_problem({1, rows, cols, true, true}, seed++);
  }
}

TEST_CASE("matmul: bias, accumulation and hard inputs") {
  uint32_t seed = 300;
  for (Fill fill : kFills) {
    for (int64_t tokens : {1, 4, 9, 34, 70, 103}) {
      for (bool bias : {false, true}) {
        for (bool accumulate : {false, true}) {
          check_problem({tokens, 11, 1100, bias, accumulate, fill}, seed++);
        }
      }
    }
  }
}

TEST_CASE("matmul: rows of which scratch holds few, or not one") {
  check_problem({25, 3, 20000, true, true}, 350);
  check_problem({2, 2, 300000}, 351);
}

TEST_CASE("matmul: the bits of C(t, r) do not depend on tokens or on the row split") {
  for (DType dtype : kAllTypes) {
    for (const cpu::KernelTable* table : products(dtype)) {
      for (int64_t cols : sampled<int64_t>({20, 1024, 4500, 1500, 3072})) {
        const Problem p{110, 67, cols, true, true, Fill::kLarge};
        const Data d(p, dtype, 400);
        const Scratch scratch(*table, 64);
        const std::vector<float> before = d.c.copy();
        const cpu::MatmulArgs whole = args_of(p, d, scratch);
        multiply(*table, dtype, whole);
        const std::vector<float> want = d.c.copy();
        for (int64_t tokens :
             sampled<int64_t>({1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 40, 64, 66, 98})) {
          std::copy(before.begin(), before.end(), d.c.data());
          std::vector<float> expected = before;
          const int64_t row_step = 1 + tokens * 5;
          for (int64_t t = 0; t < p.tokens; t += std::max<int64_t>(tokens, 21)) {
            const int64_t end = std::min(t + tokens, p.tokens);
            std::copy(want.begin() + t * d.c_stride,
                      want.begin() + std::min<int64_t>(end * d.c_stride, want.size()),
                      expected.begin() + t * d.c_stride);
            for (int64_t r = 0; r < p.rows; r += row_step) {
              cpu::MatmulArgs part = whole;
              part.a += t * d.a_stride;
              part.tokens = end - t;
              part.w = static_cast<const char*>(whole.w) + r * cols * dtype_bytes(dtype);
              part.rows = std::min(row_step, p.rows - r);
              part.bias += r;
              part.c += t * d.c_stride + r;
              multiply(*table, dtype, part);
            }
          }
          CHECK(compare_bits(d.c.copy(), expected, label_of(*table, dtype, p, 400)) == "");
        }
      }
    }
  }
}

TEST_CASE("matmul: what is read after it is asked for, and changes no bit") {
  for (DType dtype : {DType::kF32, DType::kF16}) {
    for (const cpu::KernelTable* table : tiers()) {
      for (int64_t tokens : {1, 6, 7, 8, 9}) {
        const Problem p{tokens, 67, 300, true, true, Fill::kLarge};
        const Data d(p, dtype, 450);
        const Scratch scratch(*table, 64);
        const std::vector<float> before = d.c.copy();
        cpu::MatmulArgs args = args_of(p, d, scratch);
        multiply(*table, dtype, args);
        const std::vector<float> want = d.c.copy();
        std::copy(before.begin(), before.end(), d.c.data());
        // Nothing is read there: of the second, which is short, nothing is taken either.
        const auto* far = reinterpret_cast<const std::byte*>(uintptr_t{64});
        const int64_t tile = p.cols * dtype_bytes(dtype);
        std::vector<cpu::ReadAfter::Stretch> stretches = {
            {far, 5 * tile / 2 + 1}, {far, tile / 2 - 1}, {far, 1000 * tile}};
        cpu::ReadAfter after{stretches.data(), stretches.data() + stretches.size()};
        args.after = &after;
        multiply(*table, dtype, args);
        const std::string label = label_of(*table, dtype, p, 450);
        CHECK(compare_bits(d.c.copy(), want, label) == "");
        const bool asks =
            tokens > table->read_after_tokens[index_of(dtype)] && tokens <= cpu::kDecodeTokens;
        CHECK_MESSAGE((after.first == stretches.data() + (asks ? 2 : 0)), label);
        CHECK_MESSAGE((stretches[0].at == far + (asks ? 3 * tile : 0)), label);
        CHECK_MESSAGE((stretches[1].at == far), label);
        CHECK_MESSAGE(((stretches[2].at > far) == asks), label);
        CHECK_MESSAGE((stretches[2].at - far + stretches[2].bytes == 1000 * tile), label);
      }
    }
  }
}

TEST_CASE(
    "matmul: slices of the rows, in any order, are all of them once, also of the same input") {
  for (DType dtype : kAllTypes) {
    for (const cpu::KernelTable* table : products(dtype)) {
      for (int64_t rows : sampled<int64_t>({67, 1, 4, 31, 33, 200})) {
        for (int64_t tokens : {1, 2, 3, 5, 8}) {
          // Of the last ones no tier's scratch holds the input whole.
          const int64_t cols = tokens == 1 && rows < 100   ? 2100
                               : tokens == 8 && rows == 67 ? 40000
                                                           : 300;
          const Problem p{tokens, rows, cols, true, true, Fill::kLarge};
          const Data d(p, dtype, 500);
          const Scratch scratch(*table, 64);
          const std::vector<float> before = d.c.copy();
          cpu::MatmulArgs args = args_of(p, d, scratch);
          multiply(*table, dtype, args);
          const std::vector<float> want = d.c.copy();
          for (int64_t slices : sampled<int64_t>({2, 3, 7, 64})) {
            for (bool same_input : {false, true}) {
              std::copy(before.begin(), before.end(), d.c.data());
              const Scratch fresh(*table, 64);
              args.scratch = fresh.data();
              args.slices = slices;
              for (int64_t i = 0; i < slices; ++i) {  // the first may have no rows
                args.slice = same_input ? i : slices - 1 - i;
                args.same_input = same_input && i > 0;
                multiply(*table, dtype, args);
              }
              CHECK(compare_bits(d.c.copy(), want, label_of(*table, dtype, p, slices)) == "");
            }
          }
        }
      }
    }
  }
}

}  // namespace helm::test
