// From a plan to programs. Pure: knows neither devices nor memory.
#pragma once

#include <utility>
#include <vector>

#include "helm/plan.h"
#include "plan/disk.h"
#include "plan/stages.h"
#include "program/task.h"

namespace helm {

// The plan; where its KV pages may be spread, with values for both partial results of attention
// behind the others: over near pages, over far pages.
Plan with_partials(const Plan& plan);

// Rows that the second sub-batch of a split step may have; 0 where nothing is set aside for them:
// no KV pages may be spread, layers visit, or there is but one sequence.
int64_t split_rows(const Plan& plan);

// Of each kind of step that the plan can have. Needs with_partials(). Throws Error{kInvalid} where
// layers that visit a device do not follow one another there.
std::vector<Program> lower(const Plan& plan);

// One program in the making; each file has rules of its own.
class Lowering {
 public:
  Lowering(const Plan& plan, bool visits, Program::Far far);
  Program program();

 private:
  Task& add(Task::Verb verb, Task::Lane lane, DeviceIndex device, size_t begin, size_t end,
            std::vector<int32_t> after = {});
  int32_t last() const { return static_cast<int32_t>(program_.tasks.size()) - 1; }
  int32_t run(Task::Verb verb, DeviceIndex device, size_t begin, size_t end,
              std::vector<int32_t> after = {});
  int32_t copy(ValueIndex value, DeviceIndex from, DeviceIndex to);
  void stage(const StageSpan& span);
  // lower_visits.cc
  size_t group_end(size_t unit) const;
  void find_groups(const std::vector<StageSpan>& stages);
  void visit_next();
  void visit(size_t begin, size_t end, std::vector<int32_t> after);
  void visiting_group(size_t begin, size_t end);
  // lower_disk.cc
  void run_reading(size_t begin, size_t end);
  int32_t read(size_t unit);
  // lower_far.cc
  void resident(DeviceIndex device, size_t begin, size_t end);
  void spread_layer(DeviceIndex device, size_t begin, size_t end);

  const Plan& plan_;
  const std::vector<DeviceIndex> places_;  // by unit
  const std::vector<bool> lacking_;        // by unit
  const DiskLayout disk_;
  Program program_;
  std::vector<int32_t> last_run_;                  // by device
  std::vector<int32_t> handed_;                    // copies that the next run waits for
  std::vector<std::pair<size_t, size_t>> groups_;  // of units whose weights visit
  std::vector<int32_t> visits_, visiting_runs_;    // tasks of those, as far as there are
  std::vector<int32_t> disk_users_;  // tasks after which the memory of what was read is free
};

}  // namespace helm
