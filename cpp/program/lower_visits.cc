// Weights in host memory of what a device runs: ahead, as far as there are buffers; pages with
// them.
#include <algorithm>

#include "base/check.h"
#include "program/lower.h"

namespace helm {

namespace {
using Lane = Task::Lane;
using Verb = Task::Verb;
}  // namespace

// Behind the units whose weights come together with this one's: its layer, if some of it lies in
// host memory and runs elsewhere, or the unit alone; itself where nothing comes.
size_t Lowering::group_end(size_t unit) const {
  const size_t end = layer_end(plan_, unit);
  for (size_t u = unit; u < end; ++u) {
    if (plan_.units[u].device != places_[u]) return end;
  }
  return lacking_[unit] ? unit + 1 : unit;
}

void Lowering::find_groups(const std::vector<StageSpan>& stages) {
  for (const StageSpan& stage : stages) {
    const size_t before = groups_.size();
    for (size_t u = stage.begin, end = u; u < stage.end; u = std::max(end, u + 1)) {
      end = group_end(u);
      if (end > u) groups_.emplace_back(u, end);
    }
    if (before == 0 || groups_.size() == before) continue;
    if (program_.visits) {
      fail(ErrorKind::kInvalid,
           "[plan] layers whose weights visit the GPU must follow one another there; set "
           "schedule.prefill to \"compute\"");
    }
    program_.whole = true;  // what has come ahead is this step's to read
  }
}

// The next group's weights, if there is one: into the buffer that an earlier one has read. Where
// some come from disk, unit by unit.
void Lowering::visit_next() {
  const size_t i = visits_.size(), buffers = static_cast<size_t>(plan_.schedule.visit_buffers);
  if (i == groups_.size()) return;
  const auto& [begin, end] = groups_[i];
  std::vector<int32_t> after;
  if (i >= buffers) after.push_back(visiting_runs_[i - buffers]);
  const auto on_disk = [&](const DiskUnit& one) { return begin <= one.unit && one.unit < end; };
  if (std::ranges::none_of(disk_.units, on_disk)) {
    visit(begin, end, after);
  } else {
    for (size_t unit = begin; unit < end; ++unit) {
      if (plan_.units[unit].device != places_[unit]) visit(unit, unit + 1, after);
    }
  }
  visits_.push_back(last());
}

void Lowering::visit(size_t begin, size_t end, std::vector<int32_t> after) {
  const bool reads = end == begin + 1 && disk_.of(begin) != nullptr;
  if (reads) after.push_back(read(begin));
  add(Verb::kVisit, Lane::kUp, places_[begin], begin, end, std::move(after)).aside = true;
  if (reads) disk_users_.push_back(last());
}

void Lowering::visiting_group(size_t begin, size_t end) {
  const DeviceIndex device = places_[begin];
  std::vector<int32_t> after{visits_[visiting_runs_.size()]};
  const bool pages = plan_.units[begin].device != device || end > begin + 1;
  if (pages) {
    add(Verb::kCached, Lane::kUp, device, begin, end);
    after.push_back(last());
  }
  visiting_runs_.push_back(run(Verb::kRun, device, begin, end, std::move(after)));
  // Before the pages go back: copies to memory that is not page-locked may hold up the host.
  visit_next();
  if (pages) add(Verb::kWritten, Lane::kDown, device, begin, end, {visiting_runs_.back()});
}

}  // namespace helm
