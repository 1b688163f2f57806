#include "program/visits.h"

#include <algorithm>

#include "base/arena.h"
#include "cpu/stage.h"
#include "kv/cache.h"
#include "program/lower.h"

namespace helm {

Visits::Visits(const Plan& plan, const Program& program, const Weights& weights,
               std::span<std::byte> kv, Account& account)
    : plan_(plan),
      weights_(weights),
      host_kv_(kv),
      disk_(weights.disk()),
      groups_(plan.units.size()),
      loads_(plan.units.size()),
      pinned_(account.device()) {
  std::vector<std::vector<TensorIndex>> coming(groups_.size());  // by group
  size_t turn = 0;
  for (const Task& task : program.tasks) {
    if (task.verb != Task::Verb::kVisit) continue;
    const size_t first = program.visits ? layer_begin(plan, task.begin) : task.begin;
    std::vector<TensorIndex>& before = coming[first];
    if (before.empty()) groups_[first].turn = turn++;
    std::vector<bool> units(plan.units.size(), false);
    for (size_t u = task.begin; u < task.end; ++u) {
      units[u] = true;
      const AttentionOp* attention = attention_of(plan.units[u]);
      if (attention != nullptr && plan.units[u].device == kCpu)
        groups_[first].entries.push_back(static_cast<size_t>(attention->layer));
    }
    std::vector<TensorIndex> tensors = tensors_of(plan, units);
    std::erase_if(tensors, [&](TensorIndex t) {
      return plan.slice(t, task.device) != nullptr || std::ranges::find(before, t) != before.end();
    });
    const bool reads = disk_ != nullptr && disk_->layout().of(task.begin) != nullptr;
    loads_[task.begin] = {first, before.size(), before.size() + tensors.size(), reads};
    before.insert(before.end(), tensors.begin(), tensors.end());
  }
  std::vector<std::span<const std::byte>> visiting;
  int64_t largest = 0;
  for (size_t first = 0; first < groups_.size(); ++first) {
    groups_[first].tensors = placed_in_order(plan, coming[first], kCpu);
    for (const auto& [index, offset] : groups_[first].tensors) {
      const Weight& held = weights.on(kCpu)[static_cast<size_t>(index)];
      visiting.emplace_back(cpu::host_pointer<const std::byte>(held.address),
                            static_cast<size_t>(bytes_of(index)));
      largest = std::max(largest, offset + bytes_of(index));
    }
  }
  if (std::ranges::any_of(loads_, &Load::reads)) {  // as a whole: places in it overlap
    visiting.emplace_back(disk_->data(), static_cast<size_t>(disk_->bytes()));
    gone_up_ = account.device().create_event();
  }
  pinned_.lock(std::move(visiting), false);
  if (plan.schedule.visit_pages > 0) pinned_.lock({host_kv_}, true);
  ring_ = Ring(account, plan.schedule.visit_buffers, align_up(largest, kDeviceAlignment),
               "weights that visit");
  pages_ =
      DeviceMemory(account, plan.schedule.visit_pages * plan.kv.kv_heads * plan.kv.unit_bytes(),
                   "KV pages that visit");
}

bool Visits::holds(const StepView& step) const {
  int64_t pages = 0;
  for (const SequenceRun& run : step.runs) pages += run.blocks_end(plan_.kv.page_tokens);
  return pages <= plan_.schedule.visit_pages;
}

void Visits::bind(size_t unit, StageSpec& spec) const {
  const Group& group = groups_[unit];
  for (const size_t entry : group.entries) spec.kv[entry] = pages_.address();
  for (const auto& [index, offset] : group.tensors) {
    const auto i = static_cast<size_t>(index);
    spec.weights[i] = {ring_[group.turn].address + offset, weights_.on(kCpu)[i].format};
  }
}

void Visits::load(size_t unit, Stream& stream) {
  const Load& load = loads_[unit];
  Ring::Buffer& to = buffer(load.group);
  if (load.reads) {
    give_back();  // this unit may come to lie there
    disk_->acquire(unit);
  }
  stream.wait(*to.read);
  for (size_t i = load.first; i < load.end; ++i) {
    const auto& [index, offset] = groups_[load.group].tensors[i];
    const Weight& held = weights_.on(kCpu)[static_cast<size_t>(index)];
    stream.upload(to.address + offset, cpu::host_pointer(held.address), bytes_of(index));
  }
  stream.record(*to.loaded);
  if (!load.reads) return;
  stream.record(*gone_up_);
  to_give_back_ = unit;
}

void Visits::give_back() {
  if (!to_give_back_) return;
  gone_up_->synchronize();
  disk_->release(*to_give_back_);
  to_give_back_.reset();
}

void Visits::move_pages(size_t unit, bool up, const StepViews& views, Stream& stream) {
  const KvSpec& kv = plan_.kv;
  for (const size_t entry : groups_[unit].entries) {
    for (const StepViews::Visit& sequence : views.visits) {
      for (int64_t b = up ? 0 : sequence.begin; b < (up ? sequence.existing : sequence.end); ++b) {
        const int32_t page = sequence.host[b * kv.entries() + static_cast<int64_t>(entry)];
        if (page == KvBlock::kNone) continue;  // before the window
        std::byte* host = host_kv_.data() + page * kv.unit_bytes();
        const DeviceAddress here =
            pages_.address() + kv.visiting_unit(entry, sequence.first + b) * kv.unit_bytes();
        if (up) {
          stream.upload(here, host, kv.page_bytes(entry));
        } else {
          stream.download(host, here, kv.page_bytes(entry));
        }
      }
    }
  }
}

}  // namespace helm
