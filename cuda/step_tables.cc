#include "cuda/step_tables.h"

#include <algorithm>
#include <cassert>
#include <limits>

#include "base/arena.h"
#include "base/check.h"
#include "cuda/check.h"

namespace helm::cuda {
namespace {

static_assert(sizeof(Run) == kRunBytes);

template <class T>
T* at(std::byte* base, int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

int64_t blocks_of(const Plan& plan, int64_t tokens) {
  return (tokens + plan.kv.page_tokens - 1) / plan.kv.page_tokens;
}

}  // namespace

StepLayout::StepLayout(const Plan& plan) {
  const Limits& limits = plan.limits;
  most_runs = std::min(limits.sequences, limits.step_tokens);
  const int64_t most_blocks = most_runs * blocks_of(plan, limits.context);
  const int64_t most_pages = (most_blocks + 1) * plan.kv.entries();
  if (most_pages > std::numeric_limits<int32_t>::max()) {
    fail(ErrorKind::kInvalid, "[cuda] a step may refer to ", most_pages,
         " pages, at most 2^31 are possible; lower the context or the number of sequences");
  }
  int64_t end = 0;
  const auto place = [&](int64_t count, size_t element) {
    const int64_t offset = end;
    end += align_up(count * static_cast<int64_t>(element), kTableAlignment);
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
  pages = place(most_pages, sizeof(int32_t));  // from here on a step uploads only what it uses
  place(most_blocks, sizeof(Run));
  bytes = step_table_bytes(plan);
  assert(end <= bytes);
}

StepUpload::StepUpload(const Plan& plan, int ordinal, void* device_memory)
    : plan_(plan), layout_(plan), device_(static_cast<std::byte*>(device_memory)) {
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

int64_t StepUpload::run_offset(int64_t run) const {
  const bool more = run >= layout_.most_runs;
  return (more ? more_runs_ : layout_.runs) +
         (more ? run - layout_.most_runs : run) * static_cast<int64_t>(sizeof(Run));
}

StepTables StepUpload::tables(int64_t first_run) const {
  StepTables tables{};
  tables.token_ids = on_device<int32_t>(layout_.token_ids);
  tables.positions = on_device<int32_t>(layout_.positions);
  tables.output_rows = on_device<int32_t>(layout_.output_rows);
  tables.row_runs = on_device<int32_t>(layout_.row_runs);
  tables.runs = on_device<Run>(run_offset(first_run));
  tables.pages = on_device<int32_t>(layout_.pages);
  tables.entries = static_cast<int32_t>(plan_.kv.entries());
  return tables;
}

const float* StepUpload::inverse_frequencies(int32_t table) const {
  return on_device<float>(layout_.rope[static_cast<size_t>(table)]);
}

void StepUpload::enqueue(const StepView& step, cudaStream_t stream) {
  if (step.number != 0 && step.number == number_) return;
  number_ = 0;
  StagingBlock& block = *blocks_[next_];
  next_ = (next_ + 1) % blocks_.size();
  check(cudaEventSynchronize(block.uploaded.handle()), "work of an earlier step");
  const int64_t bytes = pack(step, block.memory.data());
  check(cudaMemcpyAsync(device_, block.memory.data(), static_cast<size_t>(bytes),
                        cudaMemcpyHostToDevice, stream),
        "copying the tables of a step");
  check(cudaEventRecord(block.uploaded.handle(), stream), "recording an event");
  number_ = step.number;
}

int64_t StepUpload::pack(const StepView& step, std::byte* to) {
  assert(step.tokens() <= plan_.limits.step_tokens && step.outputs() <= plan_.limits.step_outputs);
  std::ranges::copy(step.token_ids, at<int32_t>(to, layout_.token_ids));
  std::ranges::copy(step.positions, at<int32_t>(to, layout_.positions));
  std::ranges::copy(step.output_rows, at<int32_t>(to, layout_.output_rows));
  const std::span<const SequenceRun> runs = step.number == 0 ? step.runs : step.all_runs;
  const int64_t entries = plan_.kv.entries();
  packed_.clear();
  int32_t* row_runs = at<int32_t>(to, layout_.row_runs);
  int32_t* const first_page = at<int32_t>(to, layout_.pages);
  int32_t* page = first_page;
  std::fill_n(row_runs, step.tokens(), -1);
  const int32_t* copied = nullptr;  // what ends at `page`, and its length
  int64_t copied_count = 0;
  for (const SequenceRun& run : runs) {
    const int64_t end_block = run.blocks_end(plan_.kv.page_tokens);
    const int64_t count = std::max<int64_t>(0, end_block - run.first_block) * entries;
    if (run.pages != copied || count != copied_count) page = std::copy_n(run.pages, count, page);
    copied = run.pages, copied_count = count;
    packed_.push_back({static_cast<int32_t>(run.first_row), static_cast<int32_t>(run.tokens),
                       static_cast<int32_t>(run.first_position),
                       static_cast<int32_t>(page - first_page - count - run.first_block * entries),
                       static_cast<int32_t>(run.first_block), static_cast<int32_t>(end_block)});
    if (row_runs[run.first_row] >= 0) continue;  // of a run before
    std::fill_n(row_runs + run.first_row, run.tokens, static_cast<int32_t>(packed_.size()) - 1);
  }
  const auto most = std::min(packed_.size(), static_cast<size_t>(layout_.most_runs));
  more_runs_ =
      align_up(layout_.pages + (page - first_page) * int64_t{sizeof(int32_t)}, kTableAlignment);
  std::copy_n(packed_.data(), most, at<Run>(to, layout_.runs));
  const Run* const end = std::copy(packed_.begin() + static_cast<ptrdiff_t>(most), packed_.end(),
                                   at<Run>(to, more_runs_));
  return reinterpret_cast<const std::byte*>(end) - to;
}

}  // namespace helm::cuda
