#include "program/buffers.h"

#include <algorithm>

#include "base/arena.h"

namespace helm {

DeviceBuffers::DeviceBuffers(const Plan& plan, DeviceIndex device,
                             const std::vector<DeviceIndex>& places,
                             std::span<const ValueIndex> more, int64_t kv_bytes, int64_t split_rows,
                             Account& account) {
  std::vector<bool> used = values_of(plan, units_on(device, places));
  for (const ValueIndex v : more) used[static_cast<size_t>(v)] = true;
  int64_t total = 0;
  std::array<std::vector<int64_t>, 2> offsets;
  const auto place = [&](SubBatch batch, int64_t tokens, int64_t outputs) {
    for (size_t v = 0; v < used.size(); ++v) {
      offsets[batch].push_back(total);
      if (!used[v]) continue;
      const int64_t bytes = value_bytes(plan, static_cast<ValueIndex>(v), tokens, outputs);
      total = align_up(total + bytes, kDeviceAlignment);
    }
  };
  place(kFirstBatch, plan.limits.step_tokens, plan.limits.step_outputs);
  if (split_rows > 0) place(kSecondBatch, split_rows, split_rows);
  int64_t scratch = 0;
  for (const StageSpan& stage : stages_of(plan, places)) {
    if (stage.device != device) continue;
    scratch = std::max(scratch, account.device().workspace_bytes(plan, stage.units(plan)));
  }
  kv_ = DeviceMemory(account, kv_bytes, "the KV cache");
  activations_ = DeviceMemory(account, total, "activations");
  workspace_ = DeviceMemory(account, scratch, "the workspace");
  for (const SubBatch batch : {kFirstBatch, kSecondBatch}) {
    values_[batch].assign(plan.values.size(), DeviceAddress::kNull);
    for (size_t v = 0; v < offsets[batch].size(); ++v) {
      if (used[v]) values_[batch][v] = activations_.address() + offsets[batch][v];
    }
  }
}

StageSpec DeviceBuffers::spec(const Plan& plan, SubBatch batch) const {
  StageSpec spec;
  spec.plan = &plan;
  spec.values = values_[batch];
  spec.kv.assign(plan.kv.layers.size(), kv());
  spec.workspace = workspace_.address();
  spec.second = batch == kSecondBatch;
  return spec;
}

void StepRows::reserve(const Limits& limits) {
  for (auto* rows : {&token_ids, &positions, &output_rows}) {
    rows->reserve(static_cast<size_t>(limits.step_tokens));
  }
  runs.reserve(static_cast<size_t>(limits.sequences));
}

void StepRows::clear() {
  for (auto* rows : {&token_ids, &positions, &output_rows, &pages, &far.pages}) rows->clear();
  runs.clear();
  far.blocks.clear();
  far.on_cpu = 0;
}

void StepViews::make(const StepRows& rows, const KvSpec& kv, const Program& program,
                     const std::vector<bool>& visiting) {
  on_cpu = of_visits = on_device = rows.view();
  visits.clear();
  far_pages.clear();
  if (program.visits) {
    bring_pages(kv, visiting);
    of_visits.runs = of_visits.all_runs = visiting_runs_;
    of_visits.number = next_step_number();
    on_device = of_visits;
  }
  if (program.far == Program::Far::kNone) return;
  part_pages(rows.far, kv);
  on_device.all_runs = runs_;
  on_device.runs = on_device.all_runs.first(rows.runs.size());
  on_device.number = next_step_number();
  const auto others = static_cast<size_t>(on_cpu.tokens()) - far_runs_.size();
  far_on_cpu = {on_cpu.token_ids.subspan(others), on_cpu.positions.subspan(others), {}, far_runs_};
}

// Layers that visit find their pages in the room for visits, block after block.
void StepViews::bring_pages(const KvSpec& kv, const std::vector<bool>& visiting) {
  const auto blocks_for = [&](int64_t positions) {
    return (positions + kv.page_tokens - 1) / kv.page_tokens;
  };
  visiting_runs_.assign(on_cpu.runs.begin(), on_cpu.runs.end());
  table_.clear();
  const int64_t entries = kv.entries();
  int64_t next = 0;
  for (const SequenceRun& run : visiting_runs_) {
    const int64_t blocks = blocks_for(run.first_position + run.tokens);
    visits.push_back({run.pages, next, blocks_for(run.first_position),
                      run.first_position / kv.page_tokens, blocks});
    for (int64_t block = 0; block < blocks; ++block, ++next) {
      for (int64_t entry = 0; entry < entries; ++entry) {
        const auto e = static_cast<size_t>(entry);
        table_.push_back(visiting[e] ? static_cast<int32_t>(kv.visiting_unit(e, next))
                                     : run.pages[block * entries + entry]);
      }
    }
  }
  const int32_t* pages = table_.data();
  for (SequenceRun& run : visiting_runs_) {
    run.pages = pages;
    pages += blocks_for(run.first_position + run.tokens) * entries;
  }
}

// Runs of near pages, of far pages where the CPU attends to them, and of each alone that visits.
void StepViews::part_pages(const FarRuns& far, const KvSpec& kv) {
  const size_t sequences = on_device.runs.size();
  const size_t others = sequences - far.on_cpu;
  const int64_t entries = kv.entries();
  runs_.assign(on_device.runs.begin(), on_device.runs.end());
  if (only_.empty()) only_.assign(kv.layers.size(), 0);
  far_runs_.clear();
  const int32_t* pages = far.pages.data();
  for (size_t r = 0; r < sequences; ++r) {
    const int64_t blocks = far.blocks[r];
    if (r >= others) {
      SequenceRun& attended = far_runs_.emplace_back(runs_[r]);
      attended.first_row = static_cast<int64_t>(r - others);
      attended.pages = pages;
      attended.end_block = blocks;
    }
    for (int64_t block = 0; r < others && block < blocks; ++block) {
      SequenceRun alone = runs_[r];
      alone.pages = only_.data();
      alone.first_block = block;
      alone.end_block = block + 1;
      runs_.push_back(alone);
      far_pages.push_back({pages + block * entries, block, alone.first_position});
    }
    runs_[r].first_block = blocks;
    runs_[r].pages += blocks * entries;
    pages += blocks * entries;
  }
}

}  // namespace helm
