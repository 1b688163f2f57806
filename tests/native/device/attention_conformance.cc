// Attention in parts on any device: append, reset, attend and merge as stages of one op each, over
// tables of any blocks, against double precision over the K and V that were appended.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "device/memory.h"
#include "device_conformance.h"
#include "oracle.h"
#include "support/check.h"

namespace helm::test {
namespace {

// Tokens that a sequence gets in the step whose attention is compared, and those before.
struct Query {
  int64_t tokens, context;
};
using Queries = std::vector<Query>;

// One layer of a small model with its pages in scattered order, and its ops as stages.
class PiecewiseAttention {
 public:
  PiecewiseAttention(Device& device, const TinyShape& shape, const Queries& queries)
      : shape_(shape),
        queries_(queries),
        account_(device, std::numeric_limits<int64_t>::max()),
        plan_(extended(shape)),
        stream_(device.create_stream()),
        kv_(account_, plan_.kv.pages() * plan_.kv.kv_heads * plan_.kv.unit_bytes(),
            "the KV cache") {
    spec_.plan = &plan_;
    spec_.kv.assign(plan_.kv.layers.size(), kv_.address());
    spec_.weights.resize(plan_.tensors.size());
    spec_.values.resize(plan_.values.size(), DeviceAddress::kNull);
    for (const ValueIndex v : {qkv_, near_, far_, out_}) {
      held_.emplace_back(account_, shape.step_tokens * width(v) * 4, "values");
      spec_.values[static_cast<size_t>(v)] = held_.back().address();
    }
    const int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    const auto attend = [&](ValueIndex partial) {
      return AttendOp{
          qkv_,           0,      partial,      kLayer,       shape.heads, shape.kv_heads,
          shape.head_dim, kScale, shape.window, shape.softcap};
    };
    units_ = {{.name = "append", .ops = {AppendOp{qkv_, q, q + kv, kLayer}}},
              {.name = "reset",
               .ops = {ResetOp{near_, shape.heads, shape.head_dim},
                       ResetOp{far_, shape.heads, shape.head_dim}}},
              {.name = "near", .ops = {attend(near_)}},
              {.name = "far", .ops = {attend(far_)}},
              {.name = "merge", .ops = {MergeOp{far_, near_, out_, shape.heads, shape.head_dim}}}};
    for (size_t u = 0; u < units_.size(); ++u) {
      spec_.units = std::span(units_).subspan(u, 1);
      held_.emplace_back(account_, device.workspace_bytes(plan_, spec_.units), "the workspace");
      spec_.workspace = held_.back().address();
      stages_.push_back(device.compile(spec_));
    }
    hand_out_pages();
    for (size_t s = 0; s < queries.size(); ++s) {
      const int64_t positions = queries[s].context + queries[s].tokens;
      rows_.push_back(random_floats(positions * width(qkv_), static_cast<uint32_t>(50 + s)));
      append_context(s);
    }
  }

  // The attention of all queries, [tokens, heads * head_dim]: blocks before `split` of each
  // sequence are far, all at once or, `one_by_one`, each in a step of its own, the last first.
  std::vector<float> run(int64_t split, bool one_by_one) {
    const std::vector<SequenceRun> all = runs_of_queries();
    std::vector<SequenceRun> near = all, far = all;
    for (size_t s = 0; s < all.size(); ++s) {
      const int64_t blocks = all[s].blocks_end(shape_.page_tokens);
      far[s].end_block = std::min(split, blocks);
      near[s].first_block = far[s].end_block;
      near[s].pages += far[s].end_block * plan_.kv.entries();
    }
    upload_queries();
    run_stage(kAppend, all);
    run_stage(kReset, all);
    run_stage(kNear, near);
    if (!one_by_one) run_stage(kFar, far);
    for (SequenceRun& run : far) {
      const int32_t* const pages = run.pages;
      for (int64_t b = one_by_one ? run.end_block : 0; b-- > 0;) {
        run.first_block = b;
        run.end_block = b + 1;
        run.pages = pages + b * plan_.kv.entries();
        run_stage(kFar, {run});
      }
    }
    run_stage(kMerge, all);
    std::vector<float> out(static_cast<size_t>(tokens() * width(out_)));
    stream_->download(out.data(), spec_.values[static_cast<size_t>(out_)],
                      static_cast<int64_t>(out.size()) * 4);
    stream_->synchronize();
    return out;
  }

  Expected expect(DType inputs, DType weights) const {
    Expected want;
    const int64_t group = shape_.heads / shape_.kv_heads, dim = shape_.head_dim;
    want.value.resize(static_cast<size_t>(tokens() * width(out_)));
    want.bound.resize(want.value.size());
    int64_t first_row = 0;
    for (size_t s = 0; s < queries_.size(); ++s) {
      const Query& query = queries_[s];
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        const auto k = kept(s, shape_.heads + head);
        const auto v = kept(s, shape_.heads + shape_.kv_heads + head);
        const float* q = rows_[s].data() + query.context * width(qkv_) + head * group * dim;
        const ExpectedAttention e =
            oracle_attention({q,
                              width(qkv_),
                              query.tokens,
                              group,
                              dim,
                              query.context,
                              0,
                              shape_.window,
                              kScale,
                              {k.data(), v.data(), nullptr, nullptr, query.context + query.tokens},
                              {},
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              0,
                              nullptr,
                              nullptr,
                              shape_.softcap},
                             plan_.kv.dtype, inputs, query.tokens > 1 ? weights : DType::kF32);
        for (int64_t i = 0; i < query.tokens * group * dim; ++i) {
          const auto at = static_cast<size_t>((first_row + i / (group * dim)) * width(out_) +
                                              head * group * dim + i % (group * dim));
          want.value[at] = e.out.value[static_cast<size_t>(i)];
          want.bound[at] = e.out.bound[static_cast<size_t>(i)];
        }
      }
      first_row += query.tokens;
    }
    return want;
  }

 private:
  static constexpr int64_t kLayer = 1;
  static constexpr float kScale = 0.3F;
  enum : size_t { kAppend, kReset, kNear, kFar, kMerge };

  // The tiny model's plan with the values of attention in parts at its end.
  Plan extended(const TinyShape& shape) {
    Plan plan = Plan::from_json(tiny_model(shape).plan);
    const auto value = [&](const char* name, int64_t width) {
      plan.values.push_back({name, width, false});
      return static_cast<ValueIndex>(plan.values.size() - 1);
    };
    qkv_ = value("q, k and v", (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    near_ = value("near", shape.heads * (shape.head_dim + 2));
    far_ = value("far", shape.heads * (shape.head_dim + 2));
    out_ = value("attention", shape.heads * shape.head_dim);
    return plan;
  }

  int64_t width(ValueIndex v) const { return plan_.values[static_cast<size_t>(v)].width; }
  int64_t tokens() const {
    int64_t count = 0;
    for (const Query& query : queries_) count += query.tokens;
    return count;
  }

  void hand_out_pages() {
    std::vector<int32_t> free(static_cast<size_t>(plan_.kv.pages()));
    std::iota(free.begin(), free.end(), 0);
    std::ranges::shuffle(free, std::mt19937(5));
    for (int32_t& page : free) page *= static_cast<int32_t>(shape_.kv_heads);
    for (const Query& query : queries_) {
      const int64_t positions = query.context + query.tokens;
      const int64_t blocks = (positions + shape_.page_tokens - 1) / shape_.page_tokens;
      const auto count = static_cast<size_t>(blocks * plan_.kv.entries());
      REQUIRE(count <= free.size());
      pages_.emplace_back(free.end() - static_cast<std::ptrdiff_t>(count), free.end());
      free.resize(free.size() - count);
    }
  }

  void append_context(size_t s) {
    for (int64_t from = 0; from < queries_[s].context; from += shape_.step_tokens) {
      const int64_t count = std::min(shape_.step_tokens, queries_[s].context - from);
      stream_->upload(spec_.values[static_cast<size_t>(qkv_)], rows_[s].data() + from * width(qkv_),
                      count * width(qkv_) * 4);
      stream_->synchronize();
      run_stage(kAppend, {{0, count, from, pages_[s].data()}});
    }
  }

  std::vector<SequenceRun> runs_of_queries() const {
    std::vector<SequenceRun> runs;
    int64_t row = 0;
    for (size_t s = 0; s < queries_.size(); ++s) {
      runs.push_back({row, queries_[s].tokens, queries_[s].context, pages_[s].data()});
      row += queries_[s].tokens;
    }
    return runs;
  }

  void upload_queries() {
    std::vector<float> rows;
    for (size_t s = 0; s < queries_.size(); ++s) {
      rows.insert(rows.end(), rows_[s].begin() + queries_[s].context * width(qkv_), rows_[s].end());
    }
    stream_->upload(spec_.values[static_cast<size_t>(qkv_)], rows.data(),
                    static_cast<int64_t>(rows.size()) * 4);
    stream_->synchronize();
  }

  // Appending takes a step of the runs' rows, the other stages one of all queries.
  void run_stage(size_t stage, std::vector<SequenceRun> runs) {
    int64_t rows = stage == kAppend ? 0 : tokens();
    if (stage == kAppend) {
      for (const SequenceRun& run : runs) rows += run.tokens;
    }
    const std::vector<int32_t> ids(static_cast<size_t>(rows));
    std::vector<int32_t> positions(ids.size());
    for (const SequenceRun& run : runs) {
      std::iota(positions.begin() + run.first_row, positions.begin() + run.first_row + run.tokens,
                static_cast<int32_t>(run.first_position));
    }
    stages_[stage]->run(*stream_, {ids, positions, {}, runs});
  }

  // K or V of one head at every position of a sequence, as the cache holds them.
  std::vector<unsigned char> kept(size_t s, int64_t head) const {
    std::vector<float> rows;
    const auto dim = static_cast<std::ptrdiff_t>(shape_.head_dim);
    for (int64_t p = 0; p < queries_[s].context + queries_[s].tokens; ++p) {
      const auto from = rows_[s].begin() + p * width(qkv_) + head * dim;
      rows.insert(rows.end(), from, from + dim);
    }
    return encode(plan_.kv.dtype, rows);
  }

  TinyShape shape_;
  Queries queries_;
  Account account_;
  ValueIndex qkv_ = 0, near_ = 0, far_ = 0, out_ = 0;
  Plan plan_;
  std::unique_ptr<Stream> stream_;
  DeviceMemory kv_;
  std::vector<DeviceMemory> held_;
  std::vector<UnitSpec> units_;
  StageSpec spec_;
  std::vector<std::vector<int32_t>> pages_;  // by sequence, [blocks, layers]
  std::vector<std::vector<float>> rows_;     // by sequence, [positions, width of qkv]
  std::vector<std::unique_ptr<Stage>> stages_;
};

}  // namespace

void conform_attention_pieces(const DeviceFactory& open, const TinyShape& shape, DType inputs,
                              DType weights) {
  const auto device = open(0);
  for (const Queries& queries : {Queries{{1, 70}, {1, 0}, {1, 131}}, Queries{{1, 129}},
                                 Queries{{3, 70}, {1, 33}, {20, 95}}, Queries{{32, 0}}}) {
    PiecewiseAttention attention(*device, shape, queries);
    const Expected want = attention.expect(inputs, weights);
    for (const int64_t split : {0, 1, 3, 1000}) {
      for (const bool one_by_one : {false, true}) {
        CHECK_EQ(compare(attention.run(split, one_by_one), want.value, want.bound,
                         "attention in parts, split at block " + std::to_string(split)),
                 "");
      }
    }
  }
}

}  // namespace helm::test
