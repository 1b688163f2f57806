// Bound products with packed weights: few rows in integers, many through panels and cuBLAS.
#include <doctest/doctest.h>

#include <cmath>
#include <sstream>

#include "cuda/kernels/packed.h"
#include "cuda/ops.h"
#include "cuda_emulation.h"
#include "oracle.h"
#include "packed_oracle.h"
#include "reference_blas.h"
#include "support/check.h"

namespace helm::test {
namespace {

constexpr int64_t kMostTokens = 100;

// One product of two parts, the first with a bias, over a value of the step's tokens.
struct Problem {
  int64_t tokens, cols;
  int64_t rows[2];
  Format formats[2];
  bool accumulate = false;
  DType panel = DType::kBF16;
  int64_t panel_strips = 1;
};

class Product {
 public:
  Product(const Problem& p, uint32_t seed)
      : problem(p),
        width(p.rows[0] + p.rows[1]),
        parts{random_packed(p.formats[0], p.rows[0], p.cols, seed),
              random_packed(p.formats[1], p.rows[1], p.cols, seed + 1)},
        strips{Guarded<unsigned char>(parts[0].bytes), Guarded<unsigned char>(parts[1].bytes)},
        bias(random_floats(p.rows[0], seed + 2)),
        in(random_floats(p.tokens * p.cols, seed + 3, Fill::kLarge)),
        out(random_floats(p.tokens * width, seed + 4)),
        before(out.copy()) {}

  void run() {
    Plan plan;
    plan.limits = {1, kMostTokens, 1, 1};
    plan.kv.page_tokens = 1;
    plan.values = {{"in", problem.cols, false}, {"out", width, false}};
    plan.tensors = {{"first", {problem.rows[0], problem.cols}, {}, {}},
                    {"second", {problem.rows[1], problem.cols}, {}, {}},
                    {"bias", {problem.rows[0]}, {}, {}}};
    const auto address = [](const void* p) {
      return static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(p));
    };
    StageSpec spec;
    spec.plan = &plan;
    spec.weights = {{address(strips[0].data()), problem.formats[0]},
                    {address(strips[1].data()), problem.formats[1]},
                    {address(bias.data()), {}}};
    spec.values = {address(in.data()), address(out.data())};
    const int64_t narrow_bytes =
        std::max(problem.tokens * problem.cols * 2,
                 cuda::quantized_bytes(std::min<int64_t>(problem.tokens, 8), problem.cols));
    const Guarded<std::byte> narrow((narrow_bytes + 15) / 16 * 16);
    const int64_t panel_bytes = problem.panel_strips * kStripRows * problem.cols * 2;
    const Guarded<std::byte> panel((panel_bytes + 15) / 16 * 16);
    constexpr int64_t kBlasBytes = 1024;
    void* workspace = nullptr;
    REQUIRE(cudaMalloc(&workspace, kBlasBytes) == cudaSuccess);
    LinearOp op;
    op.in = 0, op.out = 1, op.accumulate = problem.accumulate;
    op.parts = {{0, 2}, {1, kNoTensor}};
    cuda::StepUpload upload(plan, 0, nullptr);
    const auto bound = cuda::bind_linear(
        op, DType::kF32,
        {spec, upload, narrow.data(), {panel.data(), panel_bytes, problem.panel}, nullptr, 0});
    cuda::Blas blas(reference_blas(), 0);
    blas.bind(nullptr, workspace, kBlasBytes);
    cuda::StepShape shape{};
    shape.tokens = problem.tokens;
    bound->launch({shape, {}, blas, nullptr});
    CHECK_MESSAGE(cudaDeviceSynchronize() == cudaSuccess, cuda_emulation::fault());
    CHECK(cudaGetLastError() == cudaSuccess);
    cudaFree(workspace);
    CHECK((narrow.intact() && panel.intact() && out.intact() && strips[0].intact()));
  }

  std::string label() const {
    std::ostringstream s;
    s << format_name(problem.formats[0]) << " and " << format_name(problem.formats[1]) << ", "
      << problem.tokens << " tokens, rows " << problem.rows[0] << " and " << problem.rows[1]
      << ", cols " << problem.cols;
    return s.str();
  }

  // f(token, part, row of the part, place in out)
  template <class F>
  void each(const F& f) const {
    for (int64_t t = 0; t < problem.tokens; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        const int part = i < problem.rows[0] ? 0 : 1;
        f(t, part, part == 0 ? i : i - problem.rows[0], static_cast<size_t>(t * width + i));
      }
    }
  }

  Problem problem;
  int64_t width;
  Packed parts[2];
  Guarded<unsigned char> strips[2];
  Guarded<float> bias, in, out;
  std::vector<float> before;
};

// The bits of the CPU's chain.
void check_few(const Problem& p, uint32_t seed) {
  Product product(p, seed);
  product.run();
  const int64_t blocks = cpu::quant_blocks(p.cols);
  const Guarded<cpu::QuantBlock> a(p.tokens * blocks);
  cpu::integer_scalar()->quantize_rows({product.in.data(), p.cols, p.tokens, p.cols, a.data()});
  std::vector<float> want(product.before.size());
  product.each([&](int64_t t, int part, int64_t row, size_t at) {
    const float* bias = part == 0 ? product.bias.data() + row : nullptr;
    want[at] = chain(product.parts[part], row, a.data() + t * blocks, p.accumulate,
                     product.before[at], bias);
  });
  CHECK(compare_bits(product.out.copy(), want, product.label()) == "");
}

double rounded(DType dtype, double x) {
  const std::vector<unsigned char> bytes = encode(dtype, {static_cast<float>(x)});
  return decode(dtype, bytes.data(), 0);
}

// Sums of exact products of rounded operands, which the reference of cuBLAS rounds once, and the
// bias once more.
void check_many(const Problem& p, uint32_t seed) {
  Product product(p, seed);
  product.run();
  std::vector<double> narrow;
  for (const float x : product.in.copy()) narrow.push_back(rounded(p.panel, x));
  std::vector<std::vector<double>> weights(2);
  for (size_t part = 0; part < 2; ++part) {
    const Packed& w = product.parts[part];
    for (int64_t r = 0; r < w.rows; ++r) {
      for (int64_t k = 0; k < w.cols; ++k) {
        const PackedWeight& one = w.at(r, k);
        const float v = one.s * static_cast<float>(one.number);
        weights[part].push_back(rounded(p.panel, v + one.m));
      }
    }
  }
  std::vector<double> want(product.before.size()), bound(want.size());
  product.each([&](int64_t t, int part, int64_t row, size_t at) {
    double sum = 0, size = 0;
    for (int64_t k = 0; k < p.cols; ++k) {
      const double w = weights[static_cast<size_t>(part)][static_cast<size_t>(row * p.cols + k)];
      const double one = w * narrow[static_cast<size_t>(t * p.cols + k)];
      sum += one, size += std::abs(one);
    }
    if (p.accumulate) sum += product.before[at];
    const double after = part == 0 ? sum + product.bias.data()[row] : sum;
    want[at] = after;
    bound[at] = kEps / 2 * (std::abs(sum) + std::abs(after)) + 1e-12 * size + 1e-36;
  });
  CHECK(compare(product.out.copy(), want, bound, product.label()) == "");
}

Format named(const char* name) {
  return format_from_name(name);
}

}  // namespace

TEST_CASE("products of few tokens with packed weights have the CPU's bits") {
  uint32_t seed = 100;
  for (const Format& format : packed_formats()) {
    for (const int64_t tokens : {1, 2, 5, 8}) {
      const int64_t cols = 40 + 65 * (seed % 5);
      check_few({tokens, cols, {16 + seed % 7, 21}, {format, named("c8.s32")}, seed % 2 == 0},
                seed);
      seed += 2;
    }
  }
}

TEST_CASE("products of many tokens with packed weights are those of their values, panel by panel") {
  uint32_t seed = 300;
  for (const Format& format : packed_formats()) {
    for (const int64_t tokens : {9, 24, 100}) {
      Problem p{tokens, 40 + 65 * (seed % 5), {16 + seed % 40, 21}, {format, named("c4.km32")}};
      p.accumulate = seed % 2 == 0;
      p.panel = seed % 3 == 0 ? DType::kF16 : DType::kBF16;
      p.panel_strips = 1 + seed % 3;
      check_many(p, seed);
      seed += 7;
    }
  }
}

TEST_CASE("panels have whole strips, no more than the matrix and no more than they may") {
  CHECK(cuda::panel_bytes(1, 100) == 16 * 100 * 2);
  CHECK(cuda::panel_bytes(33, 100) == 48 * 100 * 2);
  CHECK(cuda::panel_bytes(1 << 20, 4096) == cuda::kMostPanelBytes);
  CHECK(cuda::panel_bytes(1 << 20, 5000) <= cuda::kMostPanelBytes);
  CHECK(cuda::panel_rows(cuda::panel_bytes(1 << 20, 5000), 5000) == 3344);
  CHECK(cuda::panel_bytes(1 << 20, 1 << 24) == int64_t{16} * (1 << 24) * 2);  // one strip at least
}

}  // namespace helm::test
