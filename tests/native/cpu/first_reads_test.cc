// What a member reads first in attention is told to the product before it, which asks for it.
#include "cpu/first_reads.h"

#include <doctest/doctest.h>

#include <map>
#include <numeric>
#include <set>
#include <variant>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/stage.h"
#include "tiny_model.h"

namespace {

using helm::AttentionOp;
using helm::LinearOp;
using helm::Plan;
using helm::SequenceRun;
using helm::StepView;
using helm::Team;
using helm::ThreadPool;
using helm::cpu::FirstReads;
using helm::cpu::KvPages;
using helm::cpu::ReadAfter;
using helm::test::tiny_model;
using helm::test::TinyShape;

struct Read {
  const std::byte* at;
  int64_t bytes;
  bool operator==(const Read&) const = default;
};

std::vector<Read> reads_of(const ReadAfter& list) {
  std::vector<Read> reads;
  for (const auto* one = list.first; one != list.end; ++one) reads.push_back({one->at, one->bytes});
  return reads;
}

// A step of several sequences, of so many tokens each, whose first rows have these positions.
struct Step {
  Step(const Plan& plan, const std::vector<int64_t>& first_positions, int64_t tokens) {
    const int64_t entries = plan.kv.entries();
    int32_t unit = 0;
    for (const int64_t first : first_positions) {
      const int64_t blocks = (first + tokens - 1) / plan.kv.page_tokens + 1;
      pages.emplace_back(static_cast<size_t>(blocks * entries));
      for (int32_t& page : pages.back()) {
        page = unit;
        unit += static_cast<int32_t>(plan.kv.kv_heads);
      }
      const auto row = static_cast<int64_t>(ids.size());
      runs.push_back({row, tokens, first, pages.back().data()});
      for (int64_t t = 0; t < tokens; ++t) {
        ids.push_back(1);
        positions.push_back(static_cast<int32_t>(first + t));
        rows.push_back(static_cast<int32_t>(row + t));
      }
    }
    kv.resize(static_cast<size_t>(unit * plan.kv.unit_bytes()));
  }
  StepView view() const { return {ids, positions, rows, runs}; }
  // K and V of every sequence's heads and blocks, in the order of attention.
  std::vector<Read> reads(const Plan& plan, int64_t layer) {
    const KvPages at{kv.data(), plan.kv, plan.kv.layers[static_cast<size_t>(layer)].kv_heads};
    std::vector<Read> all;
    for (const SequenceRun& run : runs) {
      for (int64_t head = 0; head < at.kv_heads; ++head) {
        for (int64_t from = 0; from <= run.first_position; from += plan.kv.page_tokens) {
          const int32_t page = run.pages[from / plan.kv.page_tokens * plan.kv.entries() + layer];
          const int64_t count = std::min(plan.kv.page_tokens, run.first_position + 1 - from);
          all.push_back({at.keys(page, head), count * plan.kv.row_bytes()});
          all.push_back({at.values(page, head), count * plan.kv.row_bytes()});
        }
      }
    }
    return all;
  }

  std::vector<std::vector<int32_t>> pages;
  std::vector<SequenceRun> runs;
  std::vector<int32_t> ids, positions, rows;
  std::vector<std::byte> kv;
};

template <typename Wanted>
std::vector<Wanted> ops_of(const Plan& plan) {
  std::vector<Wanted> ops;
  for (const helm::UnitSpec& unit : plan.units) {
    for (const helm::Op& op : unit.ops) {
      if (const auto* one = std::get_if<Wanted>(&op)) ops.push_back(*one);
    }
  }
  return ops;
}

// By weights, what the products of a stage were told.
std::map<const void*, std::vector<Read>>* told = nullptr;  // kernels are plain functions

void record(const helm::cpu::MatmulArgs& args) {
  (*told)[args.w] = args.after == nullptr ? std::vector<Read>() : reads_of(*args.after);
}

// All of a plan on fake weights, tensor i at (i + 1) << 40, and zeros, by one thread.
std::map<const void*, std::vector<Read>> run_recorded(const Plan& plan, Step& step,
                                                      int64_t read_after_tokens) {
  helm::cpu::KernelTable kernels = *helm::cpu::kernels_scalar();
  for (auto& matmul : kernels.matmul) matmul = record;
  std::ranges::fill(kernels.read_after_tokens, read_after_tokens);
  const std::span units = std::span(plan.units).subspan(1);  // without the embedding's rows
  std::vector<std::vector<float>> values;
  std::vector<float> zeros(1024);
  helm::StageSpec spec;
  spec.plan = &plan;
  spec.units = units;
  for (const helm::ValueSpec& value : plan.values) {
    values.emplace_back(static_cast<size_t>(value.width * plan.limits.step_tokens));
    spec.values.push_back(helm::cpu::device_address(values.back().data()));
  }
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const auto held = plan.slice(static_cast<helm::TensorIndex>(i), false);
    const bool matrix = plan.tensors[i].shape.size() > 1;
    const auto address = matrix ? static_cast<helm::DeviceAddress>((i + 1) << 40)
                                : helm::cpu::device_address(zeros.data());
    spec.weights.push_back({address, held->format});
  }
  spec.kv.assign(plan.kv.layers.size(), helm::cpu::device_address(step.kv.data()));
  std::vector<std::max_align_t> workspace(
      static_cast<size_t>(helm::cpu::CpuStage::workspace_bytes(plan, units, kernels, 1)) /
          sizeof(std::max_align_t) +
      1);
  spec.workspace = helm::cpu::device_address(workspace.data());
  ThreadPool pool(1);
  helm::cpu::CpuStage stage(spec, kernels, pool);
  std::map<const void*, std::vector<Read>> found;
  told = &found;
  stage.run(step.view());
  told = nullptr;
  return found;
}

const void* weights_at(helm::TensorIndex tensor) {
  return reinterpret_cast<const void*>((static_cast<uintptr_t>(tensor) + 1) << 40);
}

}  // namespace

TEST_CASE("first reads: products before attention are told of it, no others") {
  const Plan plan = Plan::from_json(tiny_model().plan);
  const std::vector<int64_t> ends = {40, 3, 16};
  Step decode(plan, ends, 1);
  const auto attentions = ops_of<AttentionOp>(plan);
  const auto found = run_recorded(plan, decode, 2);
  std::set<const void*> before;
  for (const LinearOp& product : ops_of<LinearOp>(plan)) {
    const auto attention = std::ranges::find(attentions, product.out, &AttentionOp::in);
    if (attention == attentions.end()) continue;
    for (const LinearOp::Part& part : product.parts) {
      const void* w = weights_at(part.weight);
      before.insert(w);
      // Products of several layers have the same out.
      const auto layer = static_cast<size_t>(before.size() - 1) / product.parts.size();
      CHECK(found.at(w) == decode.reads(plan, attentions[layer].layer));
    }
  }
  CHECK(before.size() >= attentions.size());
  CHECK(found.size() > before.size());
  for (const auto& [w, reads] : found) CHECK((before.contains(w) || reads.empty()));
  // Where kernels do not ask, or prompts come, nobody is told.
  for (const auto& [w, reads] : run_recorded(plan, decode, 3)) CHECK(reads.empty());
  Step prompt(plan, ends, 2);
  for (const auto& [w, reads] : run_recorded(plan, prompt, 2)) CHECK(reads.empty());
}

TEST_CASE("first reads: each member has its own, as far as caches hold them") {
  TinyShape shape;
  shape.context = 9000;
  shape.pages = 4000;
  shape.head_dim = 64;
  const Plan plan = Plan::from_json(tiny_model(shape).plan);
  for (const int64_t position : {20, 8000}) {
    Step step(plan, {position, position / 2, position}, 1);
    const AttentionOp op = ops_of<AttentionOp>(plan).front();
    ThreadPool pool(2);
    helm::cpu::KernelTable kernels = *helm::cpu::kernels_scalar();
    helm::cpu::Bindings bindings{plan,    {},     {}, kernels, helm::cpu::select_integer_kernels(),
                                 {},      {},     {}, {},      {},
                                 nullptr, nullptr};
    bindings.kv.assign(plan.kv.layers.size(), helm::cpu::device_address(step.kv.data()));
    bindings.values.assign(plan.values.size(), nullptr);
    bindings.scratch.assign(2, nullptr);
    const auto attention = helm::cpu::bind_attention(op, bindings);
    std::vector<FirstReads> firsts(2);
    pool.run([&](Team& team) {
      attention->first_reads(step.view(), team, firsts[static_cast<size_t>(team.worker())]);
    });
    const std::vector<Read> all = step.reads(plan, op.layer);
    const auto half =
        static_cast<size_t>(Team::part_of(0, 2, static_cast<int64_t>(all.size()) / 2).end * 2);
    int64_t most = 0;
    for (size_t member = 0; member < 2; ++member) {
      const std::vector<Read> own(
          all.begin() + static_cast<ptrdiff_t>(member * half),
          member == 0 ? all.begin() + static_cast<ptrdiff_t>(half) : all.end());
      const std::vector<Read> found = reads_of(firsts[member].list());
      REQUIRE(found.size() <= own.size());
      CHECK(std::equal(found.begin(), found.end(), own.begin()));
      CHECK((found.size() == own.size()) == (position == 20));
      int64_t bytes = 0;
      for (const Read& read : found) bytes += read.bytes;
      most = std::max(most, bytes);
    }
    CHECK(most > 0);
    CHECK(most <= (int64_t{2} << 20) + plan.kv.page_tokens * plan.kv.row_bytes());
  }
}
