// Embedding, activation, narrowing, sums and choice of rows under emulation.
#include <cmath>

#include "cuda_step.h"

namespace helm::test {
namespace {

constexpr ActivationKind kKinds[] = {ActivationKind::kSilu,     ActivationKind::kGelu,
                                     ActivationKind::kGeluTanh, ActivationKind::kRelu,
                                     ActivationKind::kScale,    ActivationKind::kSoftcap};
constexpr float kFactor = 2.5f;

// Relative errors: of exp or erfc with the rounding of its argument, of a division, of products.
double bound_of(ActivationKind kind, double x, double y) {
  double exponent = std::abs(x);
  if (kind == ActivationKind::kGelu) exponent = x * x;
  if (kind == ActivationKind::kGeluTanh) exponent *= 2 + x * x * 0.08;
  return (16 + 3 * std::min(exponent, 110.0)) * kEps * std::abs(y) + 4e-37;  // exp may underflow
}

void check_activation(ActivationKind kind, bool gated, bool in_place, int64_t rows, int64_t n,
                      Fill fill, uint32_t seed) {
  const int64_t width = gated ? 2 * n : n, x_stride = width + 1;
  const int64_t y_stride = in_place ? x_stride : n + 2;
  const Guarded<float> x(random_floats((rows - 1) * x_stride + width, seed, fill));
  for (int64_t i = 0; i < x.size(); ++i) x.data()[i] *= 3;
  const std::vector<float> before = x.copy();
  const bool accumulate = seed % 3 == 0;
  const Guarded<float> y(random_floats((rows - 1) * (n + 2) + n, seed + 1));
  const std::vector<float> y_before = y.copy();
  float* out = in_place ? x.data() : y.data();
  cuda::ActivationArgs args{kind, gated, x.data(), x_stride, out, y_stride, rows, n};
  args.factor = kFactor;
  args.accumulate = accumulate;
  cuda::activation(args, kOverlapping);
  const std::string label = "activation " + std::to_string(static_cast<int>(kind)) + " gated " +
                            std::to_string(gated) + " n " + std::to_string(n) + " seed " +
                            std::to_string(seed);
  finish_kernels(label);
  std::vector<float> got;
  Expected want;
  for (int64_t i = 0; i < rows * n; ++i) {
    const float* row = before.data() + i / n * x_stride;
    const double v = row[i % n], gate = gated ? row[n + i % n] : 1.0;
    const double y0 = oracle_activation(static_cast<cpu::Activation>(kind), v, kFactor);
    const auto at = static_cast<size_t>(i / n * y_stride + i % n);
    const double held = accumulate ? (in_place ? before : y_before)[at] : 0;
    got.push_back(out[at]);
    want.value.push_back(held + y0 * gate);
    want.bound.push_back(bound_of(kind, v, y0) * std::abs(gate) +
                         2 * kEps * (std::abs(held) + std::abs(y0 * gate)));
  }
  CHECK(compare(got, want.value, want.bound, label) == "");
  CHECK_MESSAGE((x.intact() && y.intact()), label);
}

}  // namespace

TEST_CASE("cuda activations: ragged sizes, gated, in place, hard inputs") {
  uint32_t seed = 7000;
  for (ActivationKind kind : kKinds) {
    for (int64_t n : {1, 7, 255, 256, 257, 1024, 1025}) {
      for (bool gated : {false, true}) {
        for (Fill fill : kFills) {
          check_activation(kind, gated, seed % 2 == 0, 2, n, fill, seed), ++seed;
        }
      }
    }
  }
}

TEST_CASE("cuda activations: extremes stay finite and NaN stays NaN") {
  const std::vector<float> x = {-INFINITY, -1e30f, -200.0f, -90.0f, -0.0f,        0.0f,
                                90.0f,     200.0f, 1e30f,   1e38f,  std::nanf("")};
  const auto n = static_cast<int64_t>(x.size());
  for (ActivationKind kind : kKinds) {
    if (kind == ActivationKind::kScale || kind == ActivationKind::kSoftcap) continue;
    std::vector<float> y(x.size());
    cuda::activation({kind, false, x.data() + 1, n - 1, y.data() + 1, n - 1, 1, n - 1},
                     kOverlapping);
    finish_kernels("activation of extremes");
    for (size_t i = 1; i + 1 < x.size(); ++i) {
      const double want = x[i] > 0 ? x[i] : 0;
      CHECK_MESSAGE(std::abs(y[i] - want) <= 1e-6 * std::abs(want) + 1e-30,
                    "kind " << static_cast<int>(kind) << " x " << x[i]);
    }
    CHECK(std::isnan(y.back()));
  }
}

TEST_CASE("cuda embedding, position embedding and select: exact rows of ragged width") {
  for (DType dtype : kAllTypes) {
    for (int64_t width : {1, 255, 1025}) {
      const int64_t vocab = 11, tokens = 5, offset = 2;
      const auto bytes = encode(dtype, random_floats(vocab * width, 8000));
      const Guarded<unsigned char> table(bytes);
      const Guarded<int32_t> ids(std::vector<int32_t>{3, 0, 10, 3, 7});
      const Guarded<int32_t> positions(std::vector<int32_t>{8, 0, 1, 2, 5});
      const Guarded<int32_t> outputs(std::vector<int32_t>{4, 0, 4});
      const Guarded<float> x(tokens * width), chosen(outputs.size() * width);
      cuda::StepTables step{};
      step.token_ids = ids.data();
      step.positions = positions.data();
      step.output_rows = outputs.data();
      constexpr float kScale = 3;
      cuda::embedding({table.data(), dtype, x.data(), width, tokens, kScale}, step, kOverlapping);
      cuda::position_embedding({table.data(), dtype, offset, x.data(), width, tokens}, step,
                               kOverlapping);
      cuda::select(x.data(), chosen.data(), width, outputs.size(), step, kOverlapping);
      finish_kernels("embedding");
      std::vector<float> want_x, want_chosen;
      const auto row_of = [&](int64_t row, int64_t i) {
        return static_cast<float>(decode(dtype, table.data(), row * width + i));
      };
      for (int64_t i = 0; i < x.size(); ++i) {
        const int64_t t = i / width;
        want_x.push_back(kScale * row_of(ids.data()[t], i % width) +
                         row_of(positions.data()[t] + offset, i % width));
      }
      for (int64_t i = 0; i < chosen.size(); ++i) {
        want_chosen.push_back(
            want_x[static_cast<size_t>(outputs.data()[i / width] * width + i % width)]);
      }
      CHECK(compare_bits(x.copy(), want_x, "embedding") == "");
      CHECK(compare_bits(chosen.copy(), want_chosen, "select") == "");
      CHECK((x.intact() && chosen.intact() && table.intact()));
    }
  }
}

TEST_CASE("cuda narrow: rounds to nearest even, strided; what exceeds f16 is its largest number") {
  std::vector<float> hard = {0.0f,     -0.0f,     1e-8f,          6e-8f,    -6.1e-5f,
                             65504.0f, 65519.0f,  65520.0f,       3.39e38f, 1e38f,
                             INFINITY, -INFINITY, 1.00048828125f, 1e5f,     -1e5f};
  for (uint32_t i = 0; i < 3000; ++i) {
    hard.push_back(random_floats(1, i, Fill::kLarge)[0]);
    hard.push_back(std::ldexp(1.0f + static_cast<float>(i) / 65536, static_cast<int>(i % 40) - 30));
  }
  const auto cols = static_cast<int64_t>(hard.size()) / 3, stride = cols + 1;
  std::vector<float> x(static_cast<size_t>(2 * stride + cols));
  for (int64_t i = 0; i < 3 * cols; ++i) {
    x[static_cast<size_t>(i / cols * stride + i % cols)] = hard[static_cast<size_t>(i)];
  }
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const Guarded<uint16_t> y(3 * cols);
    cuda::narrow(x.data(), stride, 3, cols, dtype, y.data(), kOverlapping);
    finish_kernels("narrow");
    for (int64_t i = 0; i < y.size(); ++i) {
      float v = hard[static_cast<size_t>(i)];
      if (dtype == DType::kF16) v = std::clamp(v, -65504.0f, 65504.0f);
      CHECK_MESSAGE(y.data()[i] == (dtype == DType::kF16 ? encode_f16(v) : encode_bf16(v)),
                    "narrow of " << v);
    }
    CHECK(y.intact());
    const float nan = std::nanf("");
    cuda::narrow(&nan, 1, 1, 1, dtype, y.data(), kOverlapping);
    finish_kernels("narrow");
    CHECK(std::isnan(decode(dtype, y.data(), 0)));
  }
}

TEST_CASE("cuda activations: the copy for a product has the bits of narrowing the result") {
  uint32_t seed = 8500;
  for (ActivationKind kind : kKinds) {
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const int64_t rows = 3, n = 1027, stride = n + 3;
      const Guarded<float> x(random_floats(rows * 2 * n, ++seed, Fill::kLarge));
      const Guarded<float> y(rows * stride), plain(rows * stride);
      const Guarded<uint16_t> want(rows * n), beside(rows * n), alone(rows * n);
      cuda::ActivationArgs args{kind, true, x.data(), 2 * n, plain.data(), stride, rows, n};
      cuda::activation(args, kOverlapping);
      cuda::narrow(plain.data(), stride, rows, n, dtype, want.data(), kOverlapping);
      args.y = y.data(), args.copy = {beside.data(), dtype};
      cuda::activation(args, kOverlapping);
      args.y = nullptr, args.copy = {alone.data(), dtype};
      cuda::activation(args, kOverlapping);
      finish_kernels("activation and copy");
      CHECK(compare_bits(y.copy(), plain.copy(), "activation beside its copy") == "");
      CHECK(beside.copy() == want.copy());
      CHECK(alone.copy() == want.copy());
      CHECK((y.intact() && beside.intact() && alone.intact()));
    }
  }
}

TEST_CASE(
    "cuda add and copy_columns: every row, nothing else, the bits of the CPU; empty ops do "
    "nothing") {
  for (const int64_t cols : {1, 299, 300, 4096}) {
    for (const int64_t x_stride : {int64_t{0}, cols, cols + 4}) {
      const int64_t rows = 3, stride = cols + (cols % 4 == 0 ? 8 : 3);
      const Guarded<float> x(random_floats((rows - 1) * x_stride + cols, 1));
      const Guarded<float> y(random_floats((rows - 1) * stride + cols, 2)), z(y.copy());
      std::vector<float> sums = y.copy(), copies = sums;
      for (int64_t i = 0; i < rows * cols; ++i) {
        const float in = x.data()[i / cols * x_stride + i % cols];
        sums[static_cast<size_t>(i / cols * stride + i % cols)] += in;
        copies[static_cast<size_t>(i / cols * stride + i % cols)] = in;
      }
      cuda::add(x.data(), x_stride, rows, cols, y.data(), stride, kOverlapping);
      cuda::add(x.data(), x_stride, 0, cols, y.data(), stride, kOverlapping);
      cuda::copy_columns(x.data(), x_stride, rows, cols, z.data(), stride, kOverlapping);
      cuda::copy_columns(x.data(), x_stride, 0, cols, z.data(), stride, kOverlapping);
      finish_kernels("add");
      CHECK(compare_bits(y.copy(), sums, "add") == "");
      CHECK(compare_bits(z.copy(), copies, "copy_columns") == "");
      CHECK((y.intact() && z.intact()));
    }
  }
  cuda::select(nullptr, nullptr, 5, 0, {}, kOverlapping);
  cuda::embedding({nullptr, DType::kF16, nullptr, 5, 0}, {}, kOverlapping);
  cuda::activation({ActivationKind::kSilu, true, nullptr, 1, nullptr, 1, 0, 1}, kOverlapping);
  cuda::norm({false, nullptr, 1, nullptr, 1, 0, 1, 1, nullptr, nullptr, 0}, kOverlapping);
  cuda::rope({}, {}, kOverlapping);
  cuda::append({}, {}, kOverlapping);
  cuda::attention({}, {}, kOverlapping);
  finish_kernels("nothing");
}

TEST_CASE("cuda elementwise: more rows than blocks") {
  const int64_t rows = cuda::kMostElementwiseBlocks + 3;
  const Guarded<float> x(random_floats(rows, 3)), y(rows);
  cuda::activation({ActivationKind::kRelu, false, x.data(), 1, y.data(), 1, rows, 1}, kOverlapping);
  finish_kernels("many rows");
  std::vector<float> want = x.copy();
  for (float& v : want) v = std::max(0.0f, v);
  CHECK(compare_bits(y.copy(), want, "many rows") == "");
}

}  // namespace helm::test
