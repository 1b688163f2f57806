#include "cuda/workspace.h"

#include "device/device.h"

namespace helm::cuda {

static_assert(kScratchAlignment == kDeviceAlignment);

WorkspaceLayout::WorkspaceLayout(const Plan& plan, std::span<const UnitSpec> units,
                                 int64_t blas_workspace) {
  Scratch scratch(plan, blas_workspace);
  for (const UnitSpec& unit : units) {
    scratch.add(unit, [&](TensorIndex weight) {
      const Format format = plan.format(unit, weight);
      const bool narrows = is_dense(format) && dtype_of(format) != DType::kF32;
      return narrows ? dtype_bytes(dtype_of(format)) : 0;
    });
  }
  blas_offset = scratch.tables();
  blas_bytes = scratch.blas();
  narrow_offset = blas_offset + blas_bytes;
  partials_offset = narrow_offset + scratch.narrow();
  bytes = scratch.bytes();
}

}  // namespace helm::cuda
