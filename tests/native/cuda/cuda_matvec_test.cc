// The matrix-vector kernel under emulation, against double precision.
#include <sstream>

#include "cuda_step.h"

namespace helm::test {
namespace {

struct Problem {
  int64_t tokens, rows, cols;
  bool bias = false, accumulate = false;
  int64_t a_pad = 0, c_pad = 0;  // added to the strides
  int64_t w_shift = 0;           // elements by which the weights are off their alignment
  Fill fill = Fill::kSigned;
};

void check_problem(const Problem& p, uint32_t seed) {
  for (DType dtype : kAllTypes) {
    const int64_t a_stride = p.cols + p.a_pad, c_stride = p.rows + p.c_pad;
    const Guarded<float> a(random_floats((p.tokens - 1) * a_stride + p.cols, seed, p.fill));
    const Guarded<unsigned char> w(
        encode(dtype, random_floats(p.rows * p.cols + p.w_shift, seed + 1, p.fill)));
    const Guarded<float> bias(random_floats(p.rows, seed + 2));
    const Guarded<float> c(random_floats((p.tokens - 1) * c_stride + p.rows, seed + 3));
    const std::vector<float> before = c.copy();
    const void* weights = w.data() + p.w_shift * dtype_bytes(dtype);
    const float* b = p.bias ? bias.data() : nullptr;
    const Expected want = oracle_matmul({a.data(), a_stride, p.tokens, weights, p.rows, p.cols, b,
                                         p.accumulate, c.data(), c_stride, nullptr},
                                        dtype, before);
    cuda::matvec({a.data(), a_stride, p.tokens, weights, dtype, p.rows, p.cols, b, p.accumulate,
                  c.data(), c_stride},
                 kOverlapping);
    std::ostringstream label;
    label << "matvec dtype " << static_cast<int>(dtype) << " tokens " << p.tokens << " rows "
          << p.rows << " cols " << p.cols << " w_shift " << p.w_shift << " seed " << seed;
    finish_kernels(label.str());
    std::vector<float> got;
    for (int64_t i = 0; i < p.tokens * p.rows; ++i) {
      got.push_back(c.data()[i / p.rows * c_stride + i % p.rows]);
    }
    CHECK(compare(got, want.value, want.bound, label.str()) == "");
    for (int64_t i = 0; i < c.size(); ++i) {
      if (i % c_stride >= p.rows) CHECK(c.data()[i] == before[static_cast<size_t>(i)]);
    }
    CHECK_MESSAGE((a.intact() && w.intact() && bias.intact() && c.intact()), label.str());
  }
}

}  // namespace

TEST_CASE("cuda matvec: every token count, ragged rows and columns") {
  uint32_t seed = 100;
  for (int64_t tokens = 1; tokens <= cuda::kMatvecTokens; ++tokens) {
    for (int64_t rows : {1, 2, 7, 16, 17}) check_problem({tokens, rows, 264}, seed++);
    for (int64_t cols : {1, 7, 8, 9, 255, 256, 257, 1024}) {
      check_problem({tokens, 5, cols}, seed++);
    }
  }
}

TEST_CASE("cuda matvec: bias, accumulation, strides, unaligned weights, hard inputs") {
  uint32_t seed = 200;
  for (int64_t tokens : {1, 3, 8}) {
    for (Fill fill : kFills) {
      check_problem({tokens, 9, 512, true, false, 4, 3, 0, fill}, seed++);
      check_problem({tokens, 9, 512, false, true, 0, 1, 0, fill}, seed++);
      check_problem({tokens, 9, 520, true, true, 8, 0, 0, fill}, seed++);
    }
    check_problem({tokens, 9, 512, true, true, 1}, seed++);
    check_problem({tokens, 9, 512, true, true, 0, 0, 1}, seed++);
    check_problem({tokens, 3, 4100}, seed++);
    check_problem({tokens, 1, 12288}, seed++);
  }
}

TEST_CASE("cuda matvec: the bits of a token do not depend on the number of tokens") {
  const int64_t rows = 13, cols = 1000, most = cuda::kMatvecTokens;
  for (DType dtype : kAllTypes) {
    const Guarded<float> a(random_floats(most * cols, 300));
    const Guarded<unsigned char> w(encode(dtype, random_floats(rows * cols, 301)));
    const Guarded<float> together(most * rows), alone(most * rows);
    cuda::matvec(
        {a.data(), cols, most, w.data(), dtype, rows, cols, nullptr, false, together.data(), rows},
        kOverlapping);
    for (int64_t tokens : {1, 2, 4}) {
      for (int64_t t = 0; t < most; t += tokens) {
        cuda::matvec({a.data() + t * cols, cols, tokens, w.data(), dtype, rows, cols, nullptr,
                      false, alone.data() + t * rows, rows},
                     kOverlapping);
      }
      finish_kernels("matvec bits");
      CHECK(compare_bits(alone.copy(), together.copy(), "matvec bits") == "");
    }
  }
}

TEST_CASE("cuda matvec: no rows and no tokens do nothing") {
  float x = 5;
  cuda::matvec({&x, 1, 0, &x, DType::kF32, 1, 1, nullptr, false, &x, 1}, kOverlapping);
  cuda::matvec({&x, 1, 1, &x, DType::kF32, 0, 1, nullptr, false, &x, 1}, kOverlapping);
  finish_kernels("matvec of nothing");
  CHECK(x == 5);
}

}  // namespace helm::test
