// Kernels over packed weights under emulation: the bits of the CPU's scalar table.
#include "kernels/packed.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "cuda_step.h"
#include "packed_oracle.h"

namespace helm::test {
namespace {

constexpr std::initializer_list<int64_t> kRows = {33, 1, 16, 100, 15, 17, 64, 7};
constexpr std::initializer_list<int64_t> kCols = {300, 32, 600, 48, 72, 1, 256, 257, 31, 1100, 520};

const cpu::IntegerTable& scalar() {
  return *cpu::integer_scalar();
}

std::string label_of(const char* what, const Packed& w, int64_t tokens, uint32_t seed) {
  std::ostringstream s;
  s << what << " " << format_name(w.format) << " tokens " << tokens << " rows " << w.rows
    << " cols " << w.cols << " seed " << seed;
  return s.str();
}

std::vector<float> rows_of(const Packed& w, int64_t first, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count * w.cols));
  const int64_t strip_bytes = helm::strip_bytes(w.format, w.cols);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = first + i;
    const auto* strip =
        reinterpret_cast<const std::byte*>(w.bytes.data()) + row / kStripRows * strip_bytes;
    scalar().read_row(w.format, strip, static_cast<int>(row % kStripRows), w.cols,
                      out.data() + i * w.cols);
  }
  return out;
}

void check_quantized(const Guarded<float>& x, int64_t stride, int64_t tokens, int64_t cols,
                     const std::string& label) {
  const int64_t blocks = cpu::quant_blocks(cols);
  const Guarded<cpu::QuantBlock> want(tokens * blocks);
  scalar().quantize_rows({x.data(), stride, tokens, cols, want.data()});
  const Guarded<cuda::QuantBlock> got(tokens * blocks);
  cuda::quantize({x.data(), stride, tokens, cols, got.data()}, kOverlapping);
  finish_kernels(label);
  for (int64_t i = 0; i < tokens * blocks; ++i) {
    const cpu::QuantBlock& w = want.data()[i];
    const cuda::QuantBlock& g = got.data()[i];
    CHECK_MESSAGE(std::memcmp(w.q, g.q, sizeof w.q) == 0, label << ", block " << i);
    CHECK_MESSAGE((w.alpha == g.alpha || (std::isnan(w.alpha) && std::isnan(g.alpha))), label);
    for (int h = 0; h < 2; ++h) CHECK_MESSAGE(g.sums[h] == -w.minus_sums[h], label);
    CHECK_MESSAGE(w.far == g.far, label << ", block " << i);
    CHECK_MESSAGE((w.far == 0 || w.far_col == g.far_col), label << ", block " << i);
  }
  CHECK_MESSAGE((x.intact() && got.intact()), label);
}

struct Problem {
  int64_t tokens, rows, cols;
  bool bias = false, accumulate = false;
};

// C of the scalar table on the CPU and of the kernel, rows padded by three.
void check_product(const Problem& p, const Format& format, uint32_t seed) {
  const Packed w = random_packed(format, p.rows, p.cols, seed);
  const std::string label = label_of("packed matvec", w, p.tokens, seed);
  const Guarded<unsigned char> strips(w.bytes);
  const Guarded<float> x(random_floats(p.tokens * p.cols, seed + 1, Fill::kLarge));
  const Guarded<float> bias(random_floats(p.rows, seed + 2));
  const int64_t stride = p.rows + 3, blocks = cpu::quant_blocks(p.cols);
  const Guarded<float> c(random_floats((p.tokens - 1) * stride + p.rows, seed + 3));
  std::vector<float> want = c.copy();
  const float* const b = p.bias ? bias.data() : nullptr;

  const Guarded<cpu::QuantBlock> a(p.tokens * blocks);
  scalar().quantize_rows({x.data(), p.cols, p.tokens, p.cols, a.data()});
  scalar().product({a.data(), nullptr, p.tokens, reinterpret_cast<const std::byte*>(strips.data()),
                    format, p.rows, p.cols, b, p.accumulate, want.data(), stride});

  const Guarded<cuda::QuantBlock> quantized(p.tokens * blocks);
  cuda::quantize({x.data(), p.cols, p.tokens, p.cols, quantized.data()}, kOverlapping);
  cuda::packed_matvec({quantized.data(),
                       p.tokens,
                       {strips.data(), format, p.rows, p.cols},
                       b,
                       p.accumulate,
                       c.data(),
                       stride},
                      kOverlapping);
  finish_kernels(label);
  CHECK(compare_bits(c.copy(), want, label) == "");
  CHECK_MESSAGE((strips.intact() && bias.intact() && c.intact() && quantized.intact()), label);
}

}  // namespace

TEST_CASE("cuda quantize: the CPU's integers, scales and sums") {
  uint32_t seed = 100;
  for (const int64_t cols : {1, 16, 31, 32, 33, 64, 300}) {
    for (const Fill fill : kFills) {
      const int64_t tokens = 3, stride = cols + 5;
      Guarded<float> x(random_floats((tokens - 1) * stride + cols, seed++, fill));
      check_quantized(x, stride, tokens, cols, "quantize " + std::to_string(cols));
    }
  }
}

TEST_CASE("cuda quantize: ties, denormals, zeros, what is far out and what is not finite") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kLeast = std::numeric_limits<float>::min();
  for (const float one :
       {0.0f, -0.0f, kLeast, kLeast * 127, kLeast / 4, kInfinity, -kInfinity,
        std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
    for (const int64_t at : {0, 17, 39}) {
      Guarded<float> x(random_floats(40, 7));
      for (int64_t i = 0; i < 40; ++i) x.data()[i] = std::abs(one) < 1 ? 0.0f : x.data()[i];
      x.data()[at] = one;
      check_quantized(x, 40, 1, 40, "quantize " + std::to_string(one));
    }
  }
  // One far out of its block, and one that is not quite.
  for (const float factor : {1.5f, 2.5f, 90.0f, 1e6f, -2.5f, -90.0f}) {
    for (const int64_t at : {0, 15, 16, 31, 35}) {
      Guarded<float> x(random_floats(36, 9));
      for (int64_t i = 32; i < 36; ++i) x.data()[i] = 0.5f;
      x.data()[at] = factor;
      check_quantized(x, 36, 1, 36, "quantize far " + std::to_string(factor));
      const Guarded<cuda::QuantBlock> blocks(2);
      cuda::quantize({x.data(), 36, 1, 36, blocks.data()}, kOverlapping);
      finish_kernels("quantize far");
      if (std::abs(factor) > 2) CHECK(blocks.data()[at / 32].far != 0);
    }
  }
  Guarded<float> ties(32);
  for (int i = 0; i < 32; ++i) ties.data()[i] = static_cast<float>(i) - 15.5f;
  ties.data()[0] = 127;
  check_quantized(ties, 32, 1, 32, "quantize ties");
}

TEST_CASE("cuda packed matvec: the CPU's bits, every format and count of tokens") {
  uint32_t seed = 1000;
  for (const Format& format : packed_formats()) {
    for (const int64_t tokens : sampled<int64_t>({1, 2, 3, 4, 5, 6, 7, cuda::kMatvecTokens})) {
      for (int i = 0; i < (kFew ? 1 : 3); ++i, ++seed) {
        check_product({tokens, kRows.begin()[seed % 8], kCols.begin()[seed % 11], seed % 2 == 0,
                       seed % 3 == 0},
                      format, seed);
      }
    }
  }
}

TEST_CASE("cuda packed matvec: every format at each ragged edge") {
  uint32_t seed = 3000;
  for (const Format& format : packed_formats()) {
    for (const int64_t cols : sampled(kCols)) {
      check_product({3, 17, cols, true, true}, format, seed++);
    }
    for (const int64_t rows : sampled(kRows)) {
      check_product({1, rows, 290, false, true}, format, seed++);
    }
  }
}

TEST_CASE("cuda packed matvec: no rows and no tokens do nothing") {
  float c = 5;
  cuda::QuantBlock a{};
  const Packed w = random_packed(packed_formats().front(), 1, 32, 1);
  cuda::packed_matvec({&a, 0, {w.bytes.data(), w.format, 1, 32}, nullptr, false, &c, 1},
                      kOverlapping);
  cuda::packed_matvec({&a, 1, {w.bytes.data(), w.format, 0, 32}, nullptr, false, &c, 1},
                      kOverlapping);
  cuda::quantize({&c, 1, 0, 1, &a}, kOverlapping);
  finish_kernels("packed products of nothing");
  CHECK(c == 5);
}

TEST_CASE("cuda panels: the CPU's rows, rounded once more") {
  uint32_t seed = 5000;
  for (const Format& format : packed_formats()) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      for (const int64_t cols : sampled<int64_t>({257, 72, 300, 600})) {
        const Packed w = random_packed(format, 50, cols, seed);
        const std::string label = label_of("expand", w, 0, seed++);
        const Guarded<unsigned char> strips(w.bytes);
        for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 50}, {16, 32}, {48, 2}}) {
          const Guarded<uint16_t> y(rows * cols);
          cuda::expand({{strips.data(), format, 50, cols}, first, rows, y.data(), dtype},
                       kOverlapping);
          finish_kernels(label);
          const std::vector<unsigned char> want = encode(dtype, rows_of(w, first, rows));
          CHECK_MESSAGE(std::memcmp(y.data(), want.data(), want.size()) == 0, label);
          CHECK_MESSAGE((y.intact() && strips.intact()), label);
        }
      }
    }
  }
}

TEST_CASE("cuda embeddings: rows of packed matrices, with the CPU's bits") {
  uint32_t seed = 7000;
  for (const Format& format : packed_formats()) {
    for (const int64_t cols : {300, 24, 257}) {
      constexpr int64_t kVocabulary = 45, kOffset = 2;
      const Packed w = random_packed(format, kVocabulary, cols, seed);
      const std::string label = label_of("embedding", w, 0, seed++);
      const Guarded<unsigned char> strips(w.bytes);
      const std::vector<int32_t> ids = {0,  44, 15, 16, 7, 7, 31, 32, 1,
                                        40, 2,  3,  4,  5, 6, 8,  9,  42};
      const auto tokens = static_cast<int64_t>(ids.size());
      const Guarded<float> out(tokens * cols);
      cuda::StepTables step{};
      step.token_ids = ids.data();
      constexpr float kScale = 3;
      cuda::packed_embedding({strips.data(), format, kVocabulary, cols}, kScale, out.data(), tokens,
                             step, kOverlapping);
      finish_kernels(label);
      std::vector<float> want;
      for (const int32_t id : ids) {
        for (const float v : rows_of(w, id, 1)) want.push_back(kScale * v);
      }
      CHECK(compare_bits(out.copy(), want, label) == "");

      const std::vector<int32_t> positions = {41, 0, 13, 14};
      step.positions = positions.data();
      cuda::packed_position_embedding({strips.data(), format, kVocabulary, cols}, kOffset,
                                      out.data(), 4, step, kOverlapping);
      finish_kernels(label);
      for (size_t t = 0; t < 4; ++t) {
        const std::vector<float> row = rows_of(w, positions[t] + kOffset, 1);
        for (size_t k = 0; k < row.size(); ++k) want[t * row.size() + k] += row[k];
      }
      CHECK(compare_bits(out.copy(), want, label) == "");
      CHECK_MESSAGE((out.intact() && strips.intact()), label);
    }
  }
}

}  // namespace helm::test
