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
      groups_(plan.units.size()),
      pinned_(account.device()) {
  std::vector<std::span<const std::byte>> visiting;
  int64_t largest = 0;
  size_t turn = 0;
  for (const Task& task : program.tasks) {
    if (task.verb != Task::Verb::kVisit) continue;
    Group& group = groups_[task.begin];
    std::vector<bool> units(plan.units.size(), false);
    for (size_t u = task.begin; u < task.end; ++u) {
      units[u] = true;
      const AttentionOp* attention = attention_of(plan.units[u]);
      if (attention != nullptr && plan.units[u].device == kCpu)
        group.entries.push_back(static_cast<size_t>(attention->layer));
    }
    std::vector<TensorIndex> tensors = tensors_of(plan, units);
    std::erase_if(tensors, [&](TensorIndex t) { return plan.slice(t, task.device) != nullptr; });
    group.tensors = placed_in_order(plan, tensors, kCpu);
    group.turn = turn++;
    for (const auto& [index, offset] : group.tensors) {
      const Weight& held = weights.on(kCpu)[static_cast<size_t>(index)];
      visiting.emplace_back(cpu::host_pointer<const std::byte>(held.address),
                            static_cast<size_t>(bytes_of(index)));
      largest = std::max(largest, offset + bytes_of(index));
    }
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
  Ring::Buffer& to = buffer(unit);
  stream.wait(*to.read);
  for (const auto& [index, offset] : groups_[unit].tensors) {
    const Weight& held = weights_.on(kCpu)[static_cast<size_t>(index)];
    stream.upload(to.address + offset, cpu::host_pointer(held.address), bytes_of(index));
  }
  stream.record(*to.loaded);
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
