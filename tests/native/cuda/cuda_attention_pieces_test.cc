// Attention in parts under emulation: blocks of any choice merged into partials, partials merged
// into the output, against double precision over the same pages at once.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda_attention_problem.h"

namespace helm::test {
namespace {

// Blocks [begin, end) of a run; the end is cut to those it has.
struct Piece {
  size_t run;
  int32_t begin, end;
};
using Pieces = std::vector<Piece>;  // of one launch, at most one per run

constexpr int32_t kAllBlocks = std::numeric_limits<int32_t>::max();

Pieces of_every_run(const Problem& p, int32_t begin, int32_t end) {
  Pieces pieces;
  for (size_t r = 0; r < p.runs.size(); ++r) pieces.push_back({r, begin, end});
  return pieces;
}

// Each block of each run alone, the last first.
std::vector<Pieces> one_by_one(const Problem& p, const Data& d) {
  std::vector<Pieces> launches;
  for (size_t r = p.runs.size(); r-- > 0;) {
    for (int32_t b = d.step.runs.data()[r].end_block; b-- > 0;) launches.push_back({{r, b, b + 1}});
  }
  return launches;
}

// A partial of every row and head.
struct TestPartial {
  TestPartial(const Problem& p, const Data& d) : data(d.step.tokens * p.heads * (p.head_dim + 2)) {
    cuda::reset_partial(data.data(), d.step.tokens, p.heads, p.head_dim, kOverlapping);
    finish_kernels("reset");
  }

  // Launch after launch, each with tables of its own pieces only.
  void attend(const Problem& p, const Data& d, const std::vector<Pieces>& launches) {
    for (const Pieces& pieces : launches) {
      Guarded<cuda::Run> runs(static_cast<int64_t>(pieces.size()));
      Guarded<int32_t> row_runs(std::vector<int32_t>(static_cast<size_t>(d.step.tokens), -1));
      cuda::AttentionArgs args = d.args(p);
      args.out = nullptr;
      args.partial = data.data();
      args.rows = 0;
      args.singles = 0;
      args.runs = static_cast<int64_t>(pieces.size());
      for (size_t i = 0; i < pieces.size(); ++i) {
        cuda::Run& run = runs.data()[i] = d.step.runs.data()[pieces[i].run];
        run.end_block = std::min(run.end_block, pieces[i].end);
        run.first_block = std::min(pieces[i].begin, run.end_block);
        args.rows += run.tokens;
        args.singles += run.tokens == 1;
        std::fill_n(row_runs.data() + run.first_row, run.tokens, static_cast<int32_t>(i));
      }
      cuda::StepTables tables = d.step.tables;
      tables.runs = runs.data();
      tables.row_runs = row_runs.data();
      cuda::attention(args, tables, kOverlapping);
      finish_kernels("attend");
    }
  }

  Guarded<float> data;
};

// The partial's own sums and what `out` is merged into, against the oracle.
void check_sums(const Problem& p, const Data& d, const TestPartial& partial,
                const ExpectedAttention& want, const std::string& label) {
  std::vector<float> m, log_sum;
  for (int64_t t = 0; t < d.step.tokens; ++t) {
    const float* row = partial.data.data() + t * p.heads * (p.head_dim + 2);
    for (int64_t h = 0; h < p.heads; ++h) {
      m.push_back(row[h]);
      log_sum.push_back(static_cast<float>(static_cast<double>(row[h]) +
                                           std::log(static_cast<double>(row[p.heads + h]))));
    }
  }
  CHECK(compare(m, want.m.value, want.m.bound, label + ", maxima") == "");
  CHECK(compare(log_sum, want.log_sum.value, want.log_sum.bound, label + ", sums") == "");
}

void check_merged(const Problem& p, const Data& d, const TestPartial& first,
                  const TestPartial& second, const Expected& want, const std::string& label) {
  cuda::merge_partials(
      {first.data.data(), second.data.data(), d.out.data(), p.heads, p.head_dim, d.step.tokens},
      kOverlapping);
  finish_kernels(label);
  CHECK(compare(d.out.copy(), want.value, want.bound, label) == "");
  CHECK_MESSAGE((d.out.intact() && first.data.intact() && second.data.intact()), label);
}

// Everything into one partial, at once and block by block; and shared out over two, the far one of
// which may be empty.
void check_pieces_of(const Problem& p, DType dtype, uint32_t seed) {
  const Capability capability(p.compute);
  const Data d(p, dtype, seed);
  const ExpectedAttention want = expect_all(p, d);
  const std::string label = label_of(p, dtype, seed) + " in pieces";
  const TestPartial none(p, d);
  for (const auto& launches :
       {std::vector<Pieces>{of_every_run(p, 0, kAllBlocks)}, one_by_one(p, d)}) {
    TestPartial all(p, d);
    all.attend(p, d, launches);
    check_sums(p, d, all, want, label);
    check_merged(p, d, none, all, want.out, label);
    check_merged(p, d, all, none, want.out, label);
  }
  for (const int32_t split : {1, 2}) {
    TestPartial far(p, d), near(p, d);
    far.attend(p, d, {of_every_run(p, 0, split)});
    near.attend(p, d, {of_every_run(p, split, kAllBlocks)});
    check_merged(p, d, far, near, want.out, label);
  }
}

void check_pieces(Problem p, DType dtype, uint32_t seed) {
  check_pieces_of(p, dtype, seed);
  p.compute = 90;
  if (dtype != DType::kF32) check_pieces_of(p, dtype, seed);
}

}  // namespace

TEST_CASE("cuda attention in parts: any blocks in any order give what all give at once") {
  uint32_t seed = 6000;
  for (const auto& [page_tokens, dtype] :
       combined<int64_t, DType>({5, 1, 16, 64}, {DType::kF32, DType::kF16, DType::kBF16})) {
    check_pieces({{{1, 40}, {1, 0}, {1, 69}}, 4, 2, 24, page_tokens}, dtype, seed++);
    check_pieces({{{3, 40}, {1, 0}, {35, 20}}, 4, 2, 24, page_tokens}, dtype, seed++);
  }
  for (int64_t group : sampled<int64_t>({1, 3, 4, 8, 16})) {
    check_pieces({{{1, 50}, {1, 70}}, 2 * group, 2, 16}, DType::kF16, seed++);
    check_pieces({{{9, 40}, {1, 70}}, 2 * group, 2, 16}, DType::kBF16, seed++);
  }
  for (int64_t head_dim : sampled<int64_t>({7, 80, 128, 256})) {
    check_pieces({{{1, 50}}, 4, 2, head_dim}, DType::kBF16, seed++);
    check_pieces({{{9, 40}}, 4, 2, head_dim}, DType::kF16, seed++);
  }
}

TEST_CASE("cuda attention in parts: splits, windows across pages, scores of every size") {
  uint32_t seed = 7000;
  const std::initializer_list<int64_t> splits_of{1, 2, 5}, windows{0, 1, 64, 20};
  const std::initializer_list<float> scales{-1.0f, 0.0f, 40.0f, 1000.0f};
  for (const auto& [splits, window] : combined(splits_of, windows)) {
    check_pieces({{{1, 90}, {1, 3}}, 4, 2, 16, 16, window, splits}, DType::kF32, seed++);
    check_pieces({{{20, 75}, {1, 70}}, 4, 2, 16, 16, window, splits}, DType::kF16, seed++);
  }
  for (const auto& [splits, scale] : combined(splits_of, scales)) {
    check_pieces({{{1, 70}}, 4, 2, 16, 16, 0, splits, scale}, DType::kF32, seed++);
    check_pieces({{{20, 50}}, 4, 2, 16, 16, 0, splits, scale}, DType::kF32, seed++);
  }
}

TEST_CASE("cuda attention in parts: rows of sequences that are not attended to keep theirs") {
  for (int64_t splits : {1, 3}) {
    const Problem p{{{2, 60}, {1, 90}, {3, 10}}, 4, 2, 16, 16, 0, splits};
    const Data d(p, DType::kF16, 8000);
    TestPartial partial(p, d);
    const std::vector<float> before = partial.data.copy();
    partial.attend(p, d, {{{1, 0, kAllBlocks}}});
    const auto width = static_cast<size_t>(p.heads * (p.head_dim + 2));
    const std::vector<float> after = partial.data.copy();
    for (size_t i = 0; i < after.size(); ++i) CHECK((after[i] == before[i]) == (i / width != 2));
  }
}

TEST_CASE("cuda attention in parts: a partial without weight adds nothing") {
  for (int64_t splits : {1, 4}) {
    for (int32_t tokens : {1, 2}) {
      const Problem p{{{tokens, 150}}, 2, 1, 8, 16, 0, splits, 1.0f};
      Data d(p, DType::kF32, 8100);
      for (int64_t i = 0; i < d.x.size(); ++i) d.x.data()[i] = -1e30f;
      auto* pool = reinterpret_cast<float*>(d.pool.data());
      for (int64_t j = 0; j < 150 + tokens; ++j) {
        const float k = j == 70 ? 0.0f : 1e30f;  // score 0 for one key, -inf for the others
        std::fill_n(pool + d.step.row_at(d.kv, 0, kLayer, 0, j, false), p.head_dim, k);
      }
      TestPartial far(p, d), near(p, d);
      far.attend(p, d, {{{0, 6, kAllBlocks}}, {{0, 2, 6}}});
      near.attend(p, d, {{{0, 0, 2}}});
      cuda::merge_partials(
          {far.data.data(), near.data.data(), d.out.data(), p.heads, p.head_dim, d.step.tokens},
          kOverlapping);
      finish_kernels("merging -inf");
      const float* v = pool + d.step.row_at(d.kv, 0, kLayer, 0, 70, true);
      for (int64_t i = 0; i < d.out.size(); ++i) CHECK(d.out.data()[i] == v[i % p.head_dim]);
    }
  }
}

}  // namespace helm::test
