// Weights that a plan leaves on disk: whether the runtime can read them there, step by step.
#include <algorithm>
#include <vector>

#include "plan/disk.h"
#include "plan/reader.h"
#include "plan/stages.h"

namespace helm {

// A slice by itself. It lies in its file as the CPU holds it, see check_slice().
void PlanReader::check_disk_slice(const JsonReader& access, const SliceSpec& slice) const {
  const TensorSpec& spec = plan_.tensors[static_cast<size_t>(slice.tensor)];
  if (!spec.is_matrix()) access.reject("only matrices are read from disk");
  if (!spec.source) access.reject("\"", spec.name, "\" is bound from memory, not on disk");
  if (spec.part) access.reject("\"", spec.name, "\" is a part of a tensor; those are not on disk");
}

// All of them together, with the ring that they pass through.
void PlanReader::check_disk(const JsonReader& root) {
  const JsonReader slices = root["slices"];
  const auto on_disk = [](const SliceSpec& one) { return one.access == SliceSpec::Access::kDisk; };
  const bool any = std::ranges::any_of(plan_.slices, on_disk);
  const bool said = root.has("schedule") && root["schedule"].has("disk_ring_bytes");
  if (!any && !said) return;
  const JsonReader ring = root["schedule"]["disk_ring_bytes"];
  plan_.schedule.disk_ring_bytes = ring.integer(0, kMaxOffset);
  if (!any) {
    if (plan_.schedule.disk_ring_bytes != 0) ring.reject("expected 0, as no slice is on disk");
    return;
  }
  if (plan_.schedule.disk_ring_bytes == 0 || plan_.schedule.disk_ring_bytes % kDiskAlignment != 0) {
    ring.reject("expected a multiple of ", kDiskAlignment, ", as slices are on disk");
  }
  // Steps run all units in order, one step after the other.
  const JsonReader schedule = root["schedule"];
  const std::string where = " where weights are read from disk";
  if (plan_.schedule.decode_groups != 1) schedule["decode_groups"].reject("expected 1", where);
  if (plan_.schedule.prefill_overlap) schedule["prefill_overlap"].reject("expected false", where);
  std::vector<size_t> reader(plan_.tensors.size(), plan_.units.size());
  for (size_t u = 0; u < plan_.units.size(); ++u) {
    std::vector<bool> chosen(plan_.units.size(), false);
    chosen[u] = true;
    for (const TensorIndex t : tensors_of(plan_, chosen)) {
      const SliceSpec* held = plan_.slice(t, kCpu);
      if (held == nullptr || !on_disk(*held)) continue;
      const std::string& name = plan_.tensors[static_cast<size_t>(t)].name;
      size_t& first = reader[static_cast<size_t>(t)];
      if (plan_.units[u].device != kCpu) {
        slices.reject("\"", name, "\" is on disk; only units of the CPU read from there");
      }
      if (plan_.units[u].layer == UnitSpec::kNoLayer) {
        slices.reject("\"", name, "\" is on disk; only weights of layers may be");
      }
      if (first != plan_.units.size()) {
        slices.reject("\"", name, "\" is on disk and read by several units");
      }
      first = u;
    }
  }
  for (const DiskUnit& unit : disk_layout(plan_).units) {
    if (unit.bytes <= plan_.schedule.disk_ring_bytes) continue;
    ring.reject("holds ", plan_.schedule.disk_ring_bytes, " bytes, \"", plan_.units[unit.unit].name,
                "\" has ", unit.bytes, " on disk");
  }
}

}  // namespace helm
