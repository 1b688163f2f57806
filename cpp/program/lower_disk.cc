// Units of which weights lie on disk: each is read ahead, into memory that an earlier one has left.
#include "program/lower.h"

namespace helm {

// The runs [begin, end) of the CPU, those units apart.
void Lowering::run_reading(size_t begin, size_t end) {
  for (size_t next = begin; begin < end; begin = next) {
    if (disk_.of(begin) == nullptr) {
      while (next < end && disk_.of(next) == nullptr) ++next;
      run(Task::Verb::kRun, kCpu, begin, next);
      continue;
    }
    const size_t frees = disk_.units[disk_runs_.size()].frees;
    std::vector<int32_t> after;  // nothing where the step before has left the memory
    if (disk_runs_.size() >= frees) after.push_back(disk_runs_[disk_runs_.size() - frees]);
    add(Task::Verb::kRead, Task::Lane::kDisk, kCpu, begin, ++next, std::move(after));
    const int32_t read = last();
    disk_runs_.push_back(run(Task::Verb::kRun, kCpu, begin, next));
    std::vector<int32_t>& waited = program_.tasks.back().after;
    waited.insert(waited.begin(), read);  // the last is what a device is waited for
  }
}

}  // namespace helm
