#include "cuda/workspace.h"

#include "device/device.h"

namespace helm::cuda {

static_assert(kScratchAlignment == kDeviceAlignment);

WorkspaceLayout::WorkspaceLayout(const Plan& plan, std::span<const UnitSpec> units,
                                 int64_t blas_workspace, int64_t multiprocessors) {
  Scratch scratch(plan, blas_workspace, multiprocessors);
  for (const UnitSpec& unit : units) {
    scratch.add(unit, [&](TensorIndex weight) { return plan.format(unit, weight); });
  }
  second_tables = scratch.tables() / step_table_places(plan.limits);
  blas_offset = scratch.tables();
  blas_bytes = scratch.blas();
  narrow_offset = blas_offset + blas_bytes;
  panel_offset = narrow_offset + scratch.narrow();
  panel_bytes = scratch.panel();
  partials_offset = panel_offset + panel_bytes;
  bytes = scratch.bytes();
}

}  // namespace helm::cuda
