#include "program/visits.h"

#include <algorithm>

#include "base/arena.h"
#include "cpu/stage.h"
#include "program/lower.h"

namespace helm {

Visits::Visits(const Plan& plan, const Program& program, const Weights& weights,
               std::span<std::byte> kv, Account& account)
    : plan_(plan),
      weights_(weights),
      host_kv_(kv),
      layers_(plan.units.size()),
      pinned_(account.device()) {
  std::vector<std::span<const std::byte>> visiting;
  int64_t largest = 0;
  size_t turn = 0;
  for (const Task& task : program.tasks) {
    if (task.verb != Task::Verb::kVisit) continue;
    Layer& layer = layers_[task.begin];
    std::vector<bool> units(plan.units.size(), false);
    std::fill_n(units.begin() + static_cast<ptrdiff_t>(task.begin), task.end - task.begin, true);
    layer.tensors = placed_in_order(plan, tensors_of(plan, units), kCpu);
    layer.turn = turn++;
    layer.kv = attention_of(plan.units[task.begin])->layer;
    for (const auto& [index, offset] : layer.tensors) {
      const Weight& held = weights.on(kCpu)[static_cast<size_t>(index)];
      visiting.emplace_back(cpu::host_pointer<const std::byte>(held.address),
                            static_cast<size_t>(bytes_of(index)));
      largest = std::max(largest, offset + bytes_of(index));
    }
  }
  pinned_.lock(std::move(visiting), false);
  pinned_.lock({host_kv_}, true);
  ring_ = Ring(account, align_up(largest, kDeviceAlignment), "weights that visit");
  pages_ = DeviceMemory(account, plan.schedule.stream_pages * plan.kv.page_bytes(),
                        "KV pages that visit");
}

bool Visits::holds(const StepView& step) const {
  int64_t pages = 0;
  for (const SequenceRun& run : step.runs) pages += run.blocks_end(plan_.kv.page_tokens);
  return pages <= plan_.schedule.stream_pages;
}

void Visits::bind(size_t unit, StageSpec& spec) const {
  const Layer& layer = layers_[unit];
  spec.kv = pages_.address();
  spec.weights.assign(plan_.tensors.size(), Weight{});
  for (const auto& [index, offset] : layer.tensors) {
    const auto i = static_cast<size_t>(index);
    spec.weights[i] = {ring_[layer.turn].address + offset, weights_.on(kCpu)[i].format};
  }
}

void Visits::load(size_t unit, Stream& stream) {
  Ring::Buffer& to = buffer(unit);
  stream.wait(*to.read);
  for (const auto& [index, offset] : layers_[unit].tensors) {
    const Weight& held = weights_.on(kCpu)[static_cast<size_t>(index)];
    stream.upload(to.address + offset, cpu::host_pointer(held.address), bytes_of(index));
  }
  stream.record(*to.loaded);
}

void Visits::move_pages(size_t unit, bool up, const StepViews& views, Stream& stream) {
  const int64_t bytes = plan_.kv.page_bytes();
  for (const StepViews::Visit& sequence : views.visits) {
    const int32_t* table = sequence.host + layers_[unit].kv;
    for (int64_t b = up ? 0 : sequence.begin; b < (up ? sequence.existing : sequence.end); ++b) {
      std::byte* host = host_kv_.data() + table[b * plan_.kv.layers] * bytes;
      const DeviceAddress here = pages_.address() + (sequence.first + b) * bytes;
      if (up) {
        stream.upload(here, host, bytes);
      } else {
        stream.download(host, here, bytes);
      }
    }
  }
}

}  // namespace helm
