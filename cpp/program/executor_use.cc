// What an executor holds, and what its steps have done.
#include <algorithm>

#include "program/executor.h"

namespace helm {

DeviceUse Executor::use_of(DeviceIndex device) const {
  const DeviceBuffers& own = buffers(device);
  DeviceUse use;
  use.kv_bytes = own.kv_bytes();
  use.activations_bytes = own.activations_bytes();
  use.workspace_bytes = own.workspace_bytes();
  if (device != kCpu) {
    use.staging_bytes = (visits_ ? visits_->bytes() : 0) + stages_->device_bytes();
    return use;
  }
  use.kv_bytes += paging_ ? paging_->far_bytes() : 0;
  use.workspace_bytes += stages_->workspace_bytes();
  use.staging_bytes = stages_->staging_bytes() + (disk_ != nullptr ? disk_->bytes() : 0);
  for (const Flight& flight : flights_) use.staging_bytes += flight.staging.bytes();
  use.staging_bytes += second_.staging.bytes();
  return use;
}

void Executor::count(EngineStats& stats) const {
  const auto& tasks = programs_.front().tasks;
  stats.crossings = std::ranges::count_if(tasks, [&](const Bound& one) {
    return one.task.verb == Task::Verb::kCopy && one.task.value != plan_.logits;
  });
  stats.streamed_steps = visiting_steps_;
  stats.pageable_bytes = visits_ ? visits_->pageable_bytes() : 0;
  stats.evicted_blocks = evicted_blocks();
  stats.cpu_attentions = cpu_attentions_;
  stats.joint_steps = joint_steps_;
  stats.split_steps = split_steps_;
  stats.far_rows = far_rows_;
  stats.page_visits = page_visits_;
  if (disk_ == nullptr) return;
  stats.disk_step_bytes = disk_->layout().step_bytes;
  stats.disk_drive_bytes = disk_->read_bytes();
  for (const int64_t bytes : stats.disk_drive_bytes) stats.disk_read_bytes += bytes;
  stats.disk_used_bytes = disk_->used_bytes();
  stats.disk_direct = disk_->direct();
}

}  // namespace helm
