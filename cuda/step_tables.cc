#include "cuda/step_tables.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <variant>

#include "base/arena.h"
#include "base/check.h"
#include "cuda/check.h"

namespace helm::cuda {
namespace {

constexpr int64_t kTableAlignment = 16;

template <class T>
T* at(std::byte* base, int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

int64_t blocks_of(const Plan& plan, int64_t tokens) {
  return (tokens + plan.kv.page_tokens - 1) / plan.kv.page_tokens;
}

}  // namespace

StepLayout::StepLayout(const Plan& plan, std::span<const UnitSpec> units) {
  for (const UnitSpec& unit : units) {
    for (const Op& op : unit.ops) {
      std::visit([this](const auto& spec) { use_layer(spec); }, op);
    }
  }
  const Limits& limits = plan.limits;
  const int64_t most_runs = std::min(limits.sequences, limits.step_tokens);
  const int64_t most_pages =
      most_runs * blocks_of(plan, limits.context) * static_cast<int64_t>(layers.size());
  if (most_pages > std::numeric_limits<int32_t>::max()) {
    fail(ErrorKind::kInvalid, "[cuda] a step may refer to ", most_pages,
         " pages, at most 2^31 are possible; lower --context or the number of sequences");
  }
  bytes = 0;
  const auto place = [&](int64_t count, size_t element) {
    const int64_t offset = bytes;
    bytes += align_up(count * static_cast<int64_t>(element), kTableAlignment);
    return offset;
  };
  token_ids = place(limits.step_tokens, sizeof(int32_t));
  positions = place(limits.step_tokens, sizeof(int32_t));
  row_runs = place(limits.step_tokens, sizeof(int32_t));
  output_rows = place(limits.step_outputs, sizeof(int32_t));
  runs = place(most_runs, sizeof(Run));
  for (const RopeTable& table : plan.rope) {
    rope.push_back(place(static_cast<int64_t>(table.inv_freq.size()), sizeof(float)));
  }
  pages = place(most_pages, sizeof(int32_t));  // last, since a step uploads only those it uses
}

template <class AnyOp>
void StepLayout::use_layer(const AnyOp& op) {
  if constexpr (requires { op.layer; }) {
    if (layer_index(op.layer) < 0) layers.push_back(op.layer);
  }
}

int64_t StepLayout::layer_index(int64_t plan_layer) const {
  const auto it = std::find(layers.begin(), layers.end(), plan_layer);
  return it == layers.end() ? -1 : it - layers.begin();
}

StepUpload::StepUpload(const Plan& plan, std::span<const UnitSpec> units, int ordinal,
                       void* device_memory)
    : plan_(plan), layout_(plan, units), device_(static_cast<std::byte*>(device_memory)) {
  for (int i = 0; i < kStagingBlocks; ++i) {
    blocks_.push_back(std::make_unique<StagingBlock>(layout_.bytes, ordinal));
    for (size_t table = 0; table < plan.rope.size(); ++table) {
      std::ranges::copy(plan.rope[table].inv_freq,
                        at<float>(blocks_.back()->memory.data(), layout_.rope[table]));
    }
  }
}

StepUpload::~StepUpload() {
  for (const auto& block : blocks_) cudaEventSynchronize(block->uploaded.handle());
}

StepTables StepUpload::tables() const {
  StepTables tables{};
  tables.token_ids = on_device<int32_t>(layout_.token_ids);
  tables.positions = on_device<int32_t>(layout_.positions);
  tables.output_rows = on_device<int32_t>(layout_.output_rows);
  tables.row_runs = on_device<int32_t>(layout_.row_runs);
  tables.runs = on_device<Run>(layout_.runs);
  tables.pages = on_device<int32_t>(layout_.pages);
  tables.layers = static_cast<int32_t>(layout_.layers.size());
  return tables;
}

const float* StepUpload::inverse_frequencies(int32_t table) const {
  return on_device<float>(layout_.rope[static_cast<size_t>(table)]);
}

void StepUpload::enqueue(const StepView& step, cudaStream_t stream) {
  StagingBlock& block = *blocks_[next_];
  next_ = (next_ + 1) % blocks_.size();
  check(cudaEventSynchronize(block.uploaded.handle()), "work of an earlier step");
  const int64_t bytes = pack(step, block.memory.data());
  check(cudaMemcpyAsync(device_, block.memory.data(), static_cast<size_t>(bytes),
                        cudaMemcpyHostToDevice, stream),
        "copying the tables of a step");
  check(cudaEventRecord(block.uploaded.handle(), stream), "recording an event");
}

int64_t StepUpload::pack(const StepView& step, std::byte* to) const {
  assert(step.tokens() <= plan_.limits.step_tokens && step.outputs() <= plan_.limits.step_outputs);
  std::ranges::copy(step.token_ids, at<int32_t>(to, layout_.token_ids));
  std::ranges::copy(step.positions, at<int32_t>(to, layout_.positions));
  std::ranges::copy(step.output_rows, at<int32_t>(to, layout_.output_rows));
  Run* runs = at<Run>(to, layout_.runs);
  int32_t* row_runs = at<int32_t>(to, layout_.row_runs);
  int32_t* const first_page = at<int32_t>(to, layout_.pages);
  int32_t* page = first_page;
  std::fill_n(row_runs, step.tokens(), -1);
  for (size_t r = 0; r < step.runs.size(); ++r) {
    const SequenceRun& run = step.runs[r];
    const int64_t end_block = run.blocks_end(plan_.kv.page_tokens);
    const int64_t skipped = run.first_block * static_cast<int64_t>(layout_.layers.size());
    runs[r] = {
        static_cast<int32_t>(run.first_row),      static_cast<int32_t>(run.tokens),
        static_cast<int32_t>(run.first_position), static_cast<int32_t>(page - first_page - skipped),
        static_cast<int32_t>(run.first_block),    static_cast<int32_t>(end_block)};
    std::fill_n(row_runs + run.first_row, run.tokens, static_cast<int32_t>(r));
    if (layout_.layers.empty()) continue;
    const int32_t* row = run.pages;  // [layers of the plan]
    for (int64_t block = run.first_block; block < end_block; ++block, row += plan_.kv.layers) {
      for (const int64_t layer : layout_.layers) *page++ = row[layer];
    }
  }
  return layout_.pages + (page - first_page) * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace helm::cuda
