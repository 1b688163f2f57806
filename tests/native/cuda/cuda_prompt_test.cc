// Attention of several tokens in tensor cores under emulation: which GPUs and pages have it, tiles
// that are full and ragged, and how far the result lies from that of the kernel in f32.
#include <algorithm>
#include <cmath>

#include "cuda_attention_problem.h"

namespace helm::test {
namespace {

std::vector<float> attend(const Problem& p, const Data& d) {
  const Capability capability(p.compute);
  cuda::attention(d.args(p), d.step.tables, nullptr);
  finish_kernels(label_of(p, d.kv.dtype, 0));
  CHECK((d.out.intact() && d.pool.intact() && d.partials.intact()));
  return d.out.copy();
}

void check_prompt(Problem p, DType dtype, uint32_t seed) {
  const Data d(p, dtype, seed);
  const Expected want = expect(p, d);
  CHECK(compare(attend(p, d), want.value, want.bound, label_of(p, dtype, seed)) == "");
}

// Standard deviation of the difference, relative to that of the reference.
double distance(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    error += difference * difference;
    size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("cuda prompt attention: the GPU and the pages decide who serves") {
  struct Case {
    int compute;
    bool f16, bf16;
  };
  for (const Case& c : {Case{0, false, false},
                        {75, true, false},
                        {80, true, true},
                        {86, true, true},
                        {89, true, true},
                        {90, true, true},
                        {120, true, true}}) {
    for (const int64_t head_dim : {64, 60}) {
      const Problem p{{{5, 20}}, 4, 2, head_dim, 16, 0, 1, 0.3f, c.compute};
      const auto serves = [&](DType dtype) {
        return cuda::in_tensor_cores(Data(p, dtype, 1).args(p));
      };
      CAPTURE(c.compute);
      CHECK_FALSE(serves(DType::kF32));
      CHECK(serves(DType::kF16) == (c.f16 && head_dim == 64));
      CHECK(serves(DType::kBF16) == (c.bf16 && head_dim == 64));
    }
  }
}

TEST_CASE("cuda prompt attention: tiles of queries and keys, full, ragged and without a key") {
  uint32_t seed = 9000;
  const int32_t far = kFew ? 75 : 300;
  const std::initializer_list<int32_t> counts{16, 2, 31, 33, 32, 65}, contexts{0, 47, 63, 64, 200};
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const auto& [tokens, behind] : combined(counts, contexts)) {
      check_prompt({{{tokens, behind}}, 4, 2, 64, 48, 0, 1, 0.3f, 80}, dtype, seed++);
    }
    check_prompt({{{40, far}, {1, 90}, {3, 0}}, 8, 1, 128, 32, 0, 2, 0.1f, 90}, dtype, seed++);
    check_prompt({{{40, far}}, 8, 2, 128, 512, 70, 3, 0.1f, 90}, dtype, seed++);
    check_prompt({{{20, 90}}, 4, 1, 256, 16, 0, 1, 0.1f, 120}, dtype, seed++);
  }
}

TEST_CASE(
    "cuda prompt attention: as far from f32 as the rounding of weights, whatever the scores") {
  for (const float scale : {0.1f, 3.0f, 30.0f}) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      Problem p{{{24, 180}}, 8, 2, 64, 64, 0, 1, scale, 80};
      const Data d(p, dtype, 9500);
      const std::vector<float> narrow = attend(p, d);
      p.compute = 0;
      const double far = distance(narrow, attend(p, d));
      CAPTURE(scale);
      CHECK(far > 0);  // the two are not one kernel
      CHECK(far < (dtype == DType::kF16 ? 0x1p-11 : 0x1p-8));
    }
  }
}

TEST_CASE("cuda prompt attention: queries beyond f16 become its largest numbers") {
  const Problem p{{{2, 30}}, 2, 1, 16, 16, 0, 1, 1.0f, 80};
  const Data d(p, DType::kF16, 9600);
  for (int64_t i = 0; i < d.x.size(); ++i) d.x.data()[i] = 1e30f;
  for (const float v : attend(p, d)) CHECK(std::isfinite(v));
}

}  // namespace helm::test
