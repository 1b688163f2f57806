// Paged attention under emulation: decode and prefill, every split, window, page and head shape,
// against double precision over the same pages.
#include "cuda_attention_problem.h"

namespace helm::test {
namespace {

void check_one(const Problem& p, DType dtype, uint32_t seed) {
  const Capability capability(p.compute);
  const Data d(p, dtype, seed);
  const Expected want = expect(p, d);
  const std::string label = label_of(p, dtype, seed);
  cuda::attention(d.args(p), d.step.tables, kOverlapping);
  finish_kernels(label);
  CHECK(compare(d.out.copy(), want.value, want.bound, label) == "");
  CHECK_MESSAGE((d.x.intact() && d.pool.intact() && d.out.intact() && d.partials.intact()), label);
}

// In f32, and with several tokens also in tensor cores where the pages' dtype has them.
void check_problem(Problem p, uint32_t seed) {
  for (DType dtype : kAllTypes) check_one(p, dtype, seed);
  if (std::ranges::all_of(p.runs, [](const RunShape& run) { return run.tokens == 1; })) return;
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    p.compute = dtype == DType::kF16 && seed % 2 == 0 ? 75 : 80;
    check_one(p, dtype, seed);
  }
}

}  // namespace

TEST_CASE("cuda attention: head sizes and group sizes, decode and prefill") {
  uint32_t seed = 1000;
  for (int64_t head_dim : sampled<int64_t>({1, 7, 8, 20, 64, 72, 80, 96, 128, 136, 256})) {
    check_problem({{{1, 69}}, 4, 2, head_dim}, seed++);
    check_problem({{{19, 51}}, 4, 2, head_dim}, seed++);
  }
  for (int64_t group : sampled<int64_t>({1, 3, 5, 2, 7, 9, 4, 12, 16, 8})) {
    check_problem({{{1, 70}}, 2 * group, 2, 32}, seed++);
    check_problem({{{9, 40}}, 2 * group, 2, 32}, seed++);
  }
  check_problem({{{3, 10}}, 40, 1, 16}, seed++);  // more heads than rows of a tile
}

TEST_CASE("cuda attention: contexts from empty on, pages of every size, several runs") {
  uint32_t seed = 2000;
  for (int64_t page_tokens : sampled<int64_t>({5, 1, 16, 48, 512})) {
    check_problem({{{1, 0}, {1, 15}, {1, 16}, {1, 130}}, 4, 2, 24, page_tokens}, seed++);
    check_problem({{{1, 0}, {33, 0}, {1, 99}, {5, 60}}, 4, 2, 24, page_tokens}, seed++);
  }
  for (int32_t count : sampled({1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65})) {
    check_problem({{{1, count - 1}}, 2, 1, 16}, seed++);
    check_problem({{{count, 0}, {1, 3}}, 2, 1, 16}, seed++);
  }
}

TEST_CASE("cuda attention: splits, more than there is work for, and windows across pages") {
  uint32_t seed = 3000;
  const std::initializer_list<int64_t> splits_of{40, 2, 3, 5, 1}, windows{0, 1, 20, 64, 100};
  for (const auto& [splits, window] : combined(splits_of, windows)) {
    check_problem({{{1, 200}, {1, 3}}, 4, 2, 16, 48, window, splits}, seed++);
    check_problem({{{20, 130}, {1, 70}}, 4, 2, 16, 48, window, splits}, seed++);
  }
  check_one({{{1, 1500}}, 4, 1, 64, 512, 0, 7}, DType::kF16, seed++);
  check_one({{{1, 1500}}, 4, 1, 64, 512, 700, 7}, DType::kBF16, seed++);
  check_one({{{1, 5}}, 4, 1, 64, 512, 0, 3000}, DType::kBF16, seed++);
}

TEST_CASE("cuda attention: rows that decode beside a prompt have the kernel and splits of decode") {
  const Problem p{{{1, 1500}, {33, 20}, {1, 3}}, 4, 1, 16, 48, 0, 1};
  const Data d(p, DType::kF16, 3500);
  const Expected want = expect(p, d);
  const Guarded<unsigned char> partials(cuda::attention_partials_bytes(3, p.heads, p.head_dim, 8));
  cuda::AttentionArgs args = d.args(p);
  args.partials = partials.data();
  for (const int64_t splits : {1, 8}) {
    args.decode_splits = splits;
    const int64_t before = cuda_emulation::launches();
    cuda::attention(args, d.step.tables, kOverlapping);
    finish_kernels("mixed");
    CHECK(cuda_emulation::launches() - before == (splits == 1 ? 2 : 3));  // and a merge
    CHECK(compare(d.out.copy(), want.value, want.bound, "mixed") == "");
    CHECK((partials.intact() && d.out.intact()));
  }
}

TEST_CASE("cuda attention: a page of any size is found without a division") {
  for (const int64_t d : {1, 2, 3, 7, 16, 48, 255, 512, 641, 4096, 65537, 0x7fffffff}) {
    const cuda::Divisor divisor(d);
    for (uint32_t n : {0u, 1u, 47u, 48u, 511u, 512u, 65535u, 1000003u, 0x7ffffffeu, 0x7fffffffu}) {
      CHECK(divisor.divide(n) == n / static_cast<uint32_t>(d));
    }
    for (uint32_t i = 1; i < 3000; ++i) {
      const uint32_t multiple = static_cast<uint32_t>(d) * i;
      if (uint64_t{i} * static_cast<uint64_t>(d) > 0x7fffffff) break;
      CHECK(divisor.divide(multiple) == i);
      CHECK(divisor.divide(multiple - 1) == i - 1);
    }
  }
}

TEST_CASE("cuda attention: a score of 0, negative, and one key that takes all the weight") {
  uint32_t seed = 4000;
  const std::initializer_list<float> scales{0.0f, -1.0f, 40.0f, 1000.0f};
  const std::initializer_list<int64_t> splits_of{1, 3};
  for (const auto& [scale, splits] : combined(scales, splits_of)) {
    check_problem({{{1, 180}}, 4, 2, 16, 16, 0, splits, scale}, seed++);
    check_problem({{{20, 160}}, 4, 2, 16, 16, 0, splits, scale}, seed++);
  }
}

TEST_CASE("cuda attention: soft caps of scores") {
  uint32_t seed = 4500;
  for (const float softcap : {0.05f, 2.0f, 50.0f}) {
    check_problem({{{1, 130}, {1, 9}}, 4, 2, 24, 16, 0, 2, 0.3f, 0, softcap}, seed++);
    check_problem({{{33, 20}, {1, 9}}, 4, 2, 24, 16, 21, 1, 0.3f, 0, softcap}, seed++);
  }
}

TEST_CASE("cuda attention: scores that overflow to -inf weigh nothing") {
  for (int64_t splits : {1, 4}) {
    for (int32_t tokens : {1, 2}) {
      const Problem p{{{tokens, 150}}, 2, 1, 8, 16, 0, splits, 1.0f};
      Data d(p, DType::kF32, 4100);
      for (int64_t i = 0; i < d.x.size(); ++i) d.x.data()[i] = -1e30f;
      auto* pool = reinterpret_cast<float*>(d.pool.data());
      for (int64_t j = 0; j < 150 + tokens; ++j) {
        const float k = j == 70 ? 0.0f : 1e30f;  // score 0 for one key, -inf for the others
        std::fill_n(pool + d.step.row_at(d.kv, 0, kLayer, 0, j, false), p.head_dim, k);
      }
      cuda::attention(d.args(p), d.step.tables, kOverlapping);
      finish_kernels("attention -inf");
      const float* v = pool + d.step.row_at(d.kv, 0, kLayer, 0, 70, true);
      for (int64_t i = 0; i < d.out.size(); ++i) CHECK(d.out.data()[i] == v[i % p.head_dim]);
    }
  }
}

TEST_CASE("cuda attention: a captured launch follows the tables as the context grows") {
  cudaStream_t stream;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  const Problem longest{{{1, 400}, {1, 77}}, 4, 2, 32, 16, 0, 3};
  Data d(longest, DType::kF16, 5000);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  cuda::attention(d.args(longest), d.step.tables, stream);
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&exec, graph) == cudaSuccess);
  for (int32_t position : {0, 63, 64, 200, 400}) {
    Problem p = longest;
    p.runs[0].first_position = position;
    d.step.runs.data()[0].first_position = position;
    d.step.positions.data()[0] = position;
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    finish_kernels("attention replayed");
    const Expected want = expect(p, d);
    CHECK(compare(d.out.copy(), want.value, want.bound, "attention replayed") == "");
  }
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

}  // namespace helm::test
