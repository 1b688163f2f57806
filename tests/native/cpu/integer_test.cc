// Integer products: every table gives the bits of a naive chain of floats, for every format, count
// of tokens, slice and ragged edge; that chain is near the sum in double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "cpu/integer_isa.h"
#include "packed_oracle.h"

namespace helm::test {
namespace {

const std::vector<const cpu::IntegerTable*>& tables() {
  static const std::vector<const cpu::IntegerTable*> list = [] {
    std::vector<const cpu::IntegerTable*> found;
    for (const cpu::IntegerStatus& status : cpu::integer_report()) {
      if (status.available) {
        found.push_back(cpu::integer_kernels_of(status.isa));
      } else {
        MESSAGE("skipping " << std::string(cpu::integer_name(status.isa)) << ": " << status.reason);
      }
    }
    return found;
  }();
  return list;
}

Format named(const std::string& name) {
  for (const FormatRow& row : kFormats) {
    if (name == row.name) return row.format;
  }
  FAIL("no format " << name);
  return {};
}

struct Problem {
  int64_t tokens, rows, cols;
  bool bias, accumulate;
};

// Rows of C are padded by three.
struct Data {
  Data(const Problem& p, const Format& format, uint32_t seed)
      : packed(random_packed(format, p.rows, p.cols, seed)),
        strips(packed.bytes),
        x(random_floats(p.tokens * p.cols, seed + 1, Fill::kLarge)),
        a(p.tokens * cpu::quant_blocks(p.cols)),
        bias(random_floats(p.rows, seed + 2)),
        c_stride(p.rows + 3),
        c(random_floats((p.tokens - 1) * c_stride + p.rows, seed + 3)) {
    for (size_t i = seed % 7; i < x.size(); i += 23 + seed % 40) x[i] *= 30;  // far out
    cpu::integer_scalar()->quantize_rows({x.data(), p.cols, p.tokens, p.cols, a.data()});
  }
  cpu::QuantArgs args(const Problem& p) const {
    cpu::QuantArgs m{};
    m.a = a.data(), m.tokens = p.tokens;
    m.strips = reinterpret_cast<const std::byte*>(strips.data());
    m.format = packed.format, m.rows = p.rows, m.cols = p.cols;
    m.bias = p.bias ? bias.data() : nullptr;
    m.accumulate = p.accumulate;
    m.c = c.data(), m.c_stride = c_stride;
    return m;
  }
  bool intact() const { return strips.intact() && a.intact() && bias.intact() && c.intact(); }

  Packed packed;
  Guarded<unsigned char> strips;
  std::vector<float> x;
  Guarded<cpu::QuantBlock> a;
  Guarded<float> bias;
  int64_t c_stride;
  Guarded<float> c;
};

std::string label_of(const char* table, const Format& format, const Problem& p, uint32_t seed) {
  std::ostringstream s;
  s << table << " " << format_name(format) << " tokens " << p.tokens << " rows " << p.rows
    << " cols " << p.cols << " bias " << p.bias << " accumulate " << p.accumulate << " seed "
    << seed;
  return s.str();
}

// What C must hold, the padding of its rows as before.
std::vector<float> expected(const Problem& p, const Data& d, const std::vector<float>& before) {
  std::vector<float> want = before;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const cpu::QuantBlock* a = d.a.data() + t * cpu::quant_blocks(p.cols);
    for (int64_t r = 0; r < p.rows; ++r) {
      float& c = want[static_cast<size_t>(t * d.c_stride + r)];
      c = chain(d.packed, r, a, p.accumulate, c, p.bias ? d.bias.data() + r : nullptr);
    }
  }
  return want;
}

void check_problem(const Problem& p, const Format& format, uint32_t seed) {
  const Data d(p, format, seed);
  const std::vector<float> before = d.c.copy(), want = expected(p, d, before);
  for (const cpu::IntegerTable* table : tables()) {
    std::copy(before.begin(), before.end(), d.c.data());
    table->product(d.args(p));
    const std::string label = label_of(table->name, format, p, seed);
    CHECK(compare_bits(d.c.copy(), want, label) == "");
    CHECK_MESSAGE(d.intact(), label);
  }
}

constexpr int64_t kTokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 24, 100};
constexpr int64_t kRows[] = {33, 1, 16, 100, 15, 17, 64, 7, 130};
constexpr int64_t kCols[] = {300, 32, 600, 48, 72, 1, 256, 576, 257, 31, 900};

}  // namespace

TEST_CASE("integer products: bits of the naive chain, every format and count of tokens") {
  uint32_t seed = 1000;
  for (const Format& format : packed_formats()) {
    for (const int64_t tokens : kTokens) {
      for (int i = 0; i < (kFew || tokens > 24 ? 1 : 3); ++i, ++seed) {
        check_problem({tokens, kRows[seed % 9], kCols[seed % 11], seed % 2 == 0, seed % 3 == 0},
                      format, seed);
      }
    }
  }
}

TEST_CASE("integer products: every number of rows and many of columns") {
  uint32_t seed = 3000;
  const Format formats[] = {named("c4.km32"), named("c8.s32"), named("c6.k16"), named("c4.z128")};
  for (int64_t rows = 1; rows <= 140; rows += kFew ? 13 : 3) {
    for (const Format& format : formats) {
      check_problem({1 + rows % 5, rows, 40 + rows * 7, true, true}, format, seed++);
    }
  }
  for (int64_t cols = 1; cols <= 800; cols += kFew ? 101 : 19) {
    for (const Format& format : formats) {
      check_problem({1 + cols % 4, 33, cols, false, true}, format, seed++);
    }
  }
}

TEST_CASE("integer products: more tokens than pass the weights at once") {
  uint32_t seed = 4000;
  for (const char* format : {"c4.km32", "c6.k16", "c8.s32", "c8.z32"}) {
    for (const int64_t tokens : sampled<int64_t>({265, 270, 529})) {
      check_problem({tokens, 41, 300, seed % 2 == 0, seed % 3 == 0}, named(format), seed);
      ++seed;
    }
  }
}

TEST_CASE("integer products: near the sum in double precision") {
  uint32_t seed = 5000;
  for (const Format& format : packed_formats()) {
    const Problem p{3, 19, 600, true, true};
    const Data d(p, format, seed++);
    const std::vector<float> before = d.c.copy();
    cpu::integer_scalar()->product(d.args(p));
    std::vector<float> got;
    std::vector<double> want, bound;
    for (int64_t t = 0; t < p.tokens; ++t) {
      for (int64_t r = 0; r < p.rows; ++r) {
        const auto i = static_cast<size_t>(t * d.c_stride + r);
        const double start = static_cast<double>(before[i]) + d.bias.data()[r];
        const ExactSum sum =
            exact_sum(d.packed, r, d.a.data() + t * cpu::quant_blocks(p.cols), start);
        got.push_back(d.c.data()[i]);
        want.push_back(sum.value);
        bound.push_back(sum.bound);
      }
    }
    CHECK(compare(got, want, bound, label_of("scalar", format, p, seed)) == "");
  }
}

TEST_CASE("integer products: slices in any order are all rows once") {
  uint32_t seed = 6000;
  for (const Format& format : {named("c4.s32"), named("c8.s32")}) {
    for (const int64_t tokens : {1, 2, 3, 5, 8, 24}) {
      for (const int64_t rows : sampled<int64_t>({250, 1, 16, 65, 97})) {
        const Problem p{tokens, rows, 96, true, true};
        const Data d(p, format, seed++);
        const std::vector<float> before = d.c.copy(), want = expected(p, d, before);
        for (const cpu::IntegerTable* table : tables()) {
          for (const int64_t slices : {2, 3, 7, 40}) {
            std::copy(before.begin(), before.end(), d.c.data());
            cpu::QuantArgs args = d.args(p);
            args.slices = slices;
            for (int64_t i = slices - 1; i >= 0; --i) {
              args.slice = i;
              table->product(args);
            }
            CHECK(compare_bits(d.c.copy(), want, label_of(table->name, format, p, slices)) == "");
          }
        }
      }
    }
  }
}

TEST_CASE("integer products: tokens of chosen rows, C of others stays") {
  for (const Format& format : {named("c4.km32"), named("c8.s32")}) {
    for (const int64_t chosen : {1, 2, 3, 4, 6, 9, 13}) {
      const Problem p{20, 40, 100, true, false};
      const Data d(p, format, 7000);
      const std::vector<float> before = d.c.copy(), all = expected(p, d, before);
      std::vector<int32_t> rows;
      std::vector<float> want = before;
      for (int64_t i = 0; i < chosen; ++i) {
        rows.push_back(static_cast<int32_t>(19 - i * 3 % 20));
        const auto from = all.begin() + rows.back() * d.c_stride;
        std::copy(from, from + p.rows, want.begin() + i * d.c_stride);
      }
      for (const cpu::IntegerTable* table : tables()) {
        std::copy(before.begin(), before.end(), d.c.data());
        cpu::QuantArgs args = d.args(p);
        args.a_rows = rows.data(), args.tokens = chosen;
        table->product(args);
        CHECK(compare_bits(d.c.copy(), want, label_of(table->name, format, p, 7000)) == "");
      }
    }
  }
}

TEST_CASE("a product without tokens or rows does nothing") {
  const Problem p{2, 20, 64, false, false};
  const Data d(p, named("c4.s32"), 7500);
  const std::vector<float> before = d.c.copy();
  for (const cpu::IntegerTable* table : tables()) {
    cpu::QuantArgs args = d.args(p);
    args.tokens = 0;
    table->product(args);
    args.tokens = 2, args.rows = 0;
    table->product(args);
    CHECK(d.c.copy() == before);
  }
}

namespace {

// Integers n of a block and their scale, by sorting.
struct Integers {
  std::vector<int> n;
  float scale;
};
Integers integers_of(const std::vector<float>& x) {
  Integers out{std::vector<int>(32), 0};
  std::vector<float> sizes{0, 0};
  for (const float v : x) {
    if (!std::isfinite(v)) return {out.n, NAN};
    sizes.push_back(std::abs(v));
  }
  std::sort(sizes.rbegin(), sizes.rend());
  const bool far = sizes[0] > 0 && sizes[1] <= sizes[0] * 0.5f;
  const float a = far ? std::max(sizes[1], sizes[0] / 127.0f) : sizes[0];
  if (!std::isnormal(a / 127.0f)) return out;
  out.scale = a / 127.0f;
  for (size_t k = 0; k < x.size(); ++k) {
    out.n[k] = static_cast<int>(std::nearbyint(x[k] * (127.0f / a)));
  }
  return out;
}

}  // namespace

TEST_CASE("quantised rows: the nearest integers of each 32 columns, and their sums") {
  int far = 0;
  for (const int64_t cols : {1, 16, 17, 31, 32, 33, 100, 256}) {
    const int64_t tokens = 3, stride = cols + 5, blocks = cpu::quant_blocks(cols);
    std::vector<float> values = random_floats((tokens - 1) * stride + cols, 8000, Fill::kLarge);
    if (cols == 100) values[40] = NAN, values[static_cast<size_t>(stride + 70)] = INFINITY;
    if (cols == 256) {
      std::fill(values.begin() + 32, values.begin() + 64, 0x1p-140f);
      std::fill(values.begin() + 64, values.begin() + 224, 0.75f);
      values[70] = -1.5f, values[100] = 90.0f, values[130] = -1e6f, values[190] = 1.49f;
      std::fill(values.begin() + 192, values.begin() + 224, 0.0f);
      values[200] = -3.0f;
    }
    const Guarded<float> x(values);
    for (const cpu::IntegerTable* table : tables()) {
      const Guarded<cpu::QuantBlock> out(tokens * blocks);
      table->quantize_rows({x.data(), stride, tokens, cols, out.data()});
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t j = 0; j < blocks; ++j) {
          const float* from = x.data() + t * stride + j * 32;
          const auto n = std::min<int64_t>(32, cols - j * 32);
          const Integers want = integers_of(std::vector<float>(from, from + n));
          const cpu::QuantBlock& got = out.data()[t * blocks + j];
          std::vector<int> integers;
          for (int64_t k = 0; k < 32; ++k) integers.push_back(integer_at(got, k));
          CHECK(integers == want.n);
          far += got.far != 0;
          const int first = std::accumulate(integers.begin(), integers.begin() + 16, 0);
          const int last = std::accumulate(integers.begin() + 16, integers.end(), 0);
          CHECK(got.minus_sums[0] == -first);
          CHECK(got.minus_sums[1] == -last);
          CHECK(got.minus_sum == -first - last);
          const float floats[] = {want.scale, want.scale * static_cast<float>(first + last),
                                  want.scale * static_cast<float>(first),
                                  want.scale * static_cast<float>(last)};
          const std::vector<float> wanted(floats, floats + 4);
          CHECK(compare_bits({got.alpha, got.alpha_sum, got.alpha_sums[0], got.alpha_sums[1]},
                             wanted, table->name) == "");
        }
      }
      CHECK((x.intact() && out.intact()));
    }
  }
  CHECK(far > 10);
}

TEST_CASE("a row of packed weights as floats") {
  uint32_t seed = 9000;
  for (const Format& format : packed_formats()) {
    for (const int64_t cols : {32, 72, 300, 600}) {
      const Packed p = random_packed(format, 20, cols, seed++);
      for (const cpu::IntegerTable* table : tables()) {
        for (const int64_t r : {0, 7, 15, 16, 19}) {
          const Guarded<float> out(cols);
          const size_t strip = p.bytes.size() / 2 * static_cast<size_t>(r / 16);
          table->read_row(format, reinterpret_cast<const std::byte*>(p.bytes.data() + strip),
                          static_cast<int>(r % 16), cols, out.data());
          std::vector<float> want;  // exact in double precision, so rounded once
          for (int64_t k = 0; k < cols; ++k) {
            const PackedWeight& w = p.at(r, k);
            want.push_back(static_cast<float>(static_cast<double>(w.s) * w.number + w.m));
            out.data()[k] += 0.0f, want.back() += 0.0f;  // zeros have no sign here
          }
          CHECK(compare_bits(out.copy(), want,
                             label_of(table->name, format, {1, 20, cols, false, false}, seed)) ==
                "");
          CHECK(out.intact());
        }
      }
    }
  }
}

TEST_CASE("a probe of integer products counts what it did") {
  for (const cpu::IntegerTable* table : tables()) {
    int32_t sink = 3;
    const double few = table->probe_dot(10, &sink), more = table->probe_dot(1000, &sink);
    CHECK(few > 0);
    CHECK(more == 100 * few);
  }
}

TEST_CASE("the comparison finds one wrong scale, code and sign") {
  const Problem p{1, 16, 64, false, false};
  const Data d(p, named("c4.s32"), 9500);
  const std::vector<float> want = expected(p, d, d.c.copy());
  const auto wrong = [&](int64_t begin, int64_t end, unsigned char bits) {
    for (int64_t i = begin; i < end; ++i) d.strips.data()[i] ^= bits;
    cpu::integer_scalar()->product(d.args(p));
    for (int64_t i = begin; i < end; ++i) d.strips.data()[i] ^= bits;
    return compare_bits(d.c.copy(), want, "damaged") != "";
  };
  CHECK(!wrong(0, 0, 0));
  CHECK(wrong(0, 1, 0x01));     // the last bit of a scale
  CHECK(wrong(1, 2, 0x80));     // its sign
  CHECK(wrong(64, 128, 0x01));  // a line of codes
}

}  // namespace helm::test
