#include "plan/disk.h"

#include <algorithm>

#include "plan/stages.h"

namespace helm {
namespace {

constexpr int64_t down(int64_t bytes) {
  return bytes / kDiskAlignment * kDiskAlignment;
}
constexpr int64_t up(int64_t bytes) {
  return down(bytes + kDiskAlignment - 1);
}

// Places are within the unit.
DiskUnit unit_of(const Plan& plan, size_t number) {
  std::vector<bool> chosen(plan.units.size(), false);
  chosen[number] = true;
  struct Stretch {
    TensorIndex tensor;
    std::string file;
    int64_t begin, end;
  };
  std::vector<Stretch> stretches;
  for (const TensorIndex t : tensors_of(plan, chosen)) {
    const SliceSpec* slice = plan.slice(t, kCpu);
    if (slice == nullptr || slice->access != SliceSpec::Access::kDisk) continue;
    const SourceExtent& extent = plan.tensors[static_cast<size_t>(t)].source->extents[0];
    stretches.push_back({t, extent.file, extent.offset, extent.offset + plan.bytes(*slice)});
  }
  std::ranges::sort(stretches, [](const Stretch& a, const Stretch& b) {
    return a.file != b.file ? a.file < b.file : a.begin < b.begin;
  });
  DiskUnit made{.unit = number};
  for (const Stretch& one : stretches) {
    DiskRange* last = made.ranges.empty() ? nullptr : &made.ranges.back();
    if (last == nullptr || last->file != one.file || down(one.begin) > last->offset + last->bytes) {
      made.ranges.push_back({one.file, down(one.begin), 0, 0, made.bytes});
      last = &made.ranges.back();
    }
    last->needed = std::max(last->needed, one.end - last->offset);
    last->bytes = up(last->needed);
    made.bytes = last->place + last->bytes;
    made.tensors.emplace_back(one.tensor, last->place + one.begin - last->offset);
  }
  return made;
}

}  // namespace

const DiskUnit* DiskLayout::of(size_t unit) const {
  const auto found = std::ranges::find(units, unit, &DiskUnit::unit);
  return found == units.end() ? nullptr : &*found;
}

DiskLayout disk_layout(const Plan& plan) {
  DiskLayout layout;
  if (plan.schedule.disk_ring_bytes == 0) return layout;
  int64_t end = 0;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    DiskUnit made = unit_of(plan, u);
    if (made.ranges.empty()) continue;
    made.place = end + made.bytes > plan.schedule.disk_ring_bytes ? 0 : end;
    end = made.place + made.bytes;
    for (DiskRange& range : made.ranges) range.place += made.place;
    for (auto& [tensor, place] : made.tensors) place += made.place;
    layout.step_bytes += made.bytes;
    layout.units.push_back(std::move(made));
  }
  const size_t count = layout.units.size();
  for (size_t i = 0; i < count; ++i) {
    DiskUnit& own = layout.units[i];
    for (own.frees = 1; own.frees < count; ++own.frees) {
      const DiskUnit& before = layout.units[(i + count - own.frees) % count];
      if (before.place < own.place + own.bytes && own.place < before.place + before.bytes) break;
    }
  }
  return layout;
}

}  // namespace helm
