// Units of which weights lie on disk: each is read ahead, into memory that an earlier one has left.
#include "program/lower.h"

namespace helm {

// The next unit of those, in the order of the plan; returns the task.
int32_t Lowering::read(size_t unit) {
  const size_t frees = disk_.units[disk_users_.size()].frees;
  std::vector<int32_t> after;  // nothing where the step before has left the memory
  if (disk_users_.size() >= frees) after.push_back(disk_users_[disk_users_.size() - frees]);
  add(Task::Verb::kRead, Task::Lane::kDisk, kCpu, unit, unit + 1, std::move(after));
  return last();
}

// The runs [begin, end) of the CPU, those units apart.
void Lowering::run_reading(size_t begin, size_t end) {
  for (size_t next = begin; begin < end; begin = next) {
    if (disk_.of(begin) == nullptr) {
      while (next < end && disk_.of(next) == nullptr) ++next;
      run(Task::Verb::kRun, kCpu, begin, next);
      continue;
    }
    const int32_t there = read(begin);
    disk_users_.push_back(run(Task::Verb::kRun, kCpu, begin, ++next));
    std::vector<int32_t>& waited = program_.tasks.back().after;
    waited.insert(waited.begin(), there);  // the last is what a device is waited for
  }
}

}  // namespace helm
