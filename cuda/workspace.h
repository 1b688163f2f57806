// Where the parts of a stage's scratch lie in the memory of the GPU; plan/cuda_scratch.h says how
// large they are.
#pragma once

#include <cstdint>
#include <span>

#include "helm/plan.h"
#include "plan/cuda_scratch.h"

namespace helm::cuda {

struct WorkspaceLayout {
  WorkspaceLayout(const Plan& plan, std::span<const UnitSpec> units, int64_t blas_workspace,
                  int64_t multiprocessors);

  int64_t second_tables;  // offset of a second sub-batch's, behind those of the first
  int64_t blas_offset;    // behind both
  int64_t blas_bytes;
  int64_t narrow_offset;  // inputs of products narrowed to the weights' dtype, or quantized
  int64_t panel_offset;   // packed weights as a matrix for cuBLAS
  int64_t panel_bytes;
  int64_t partials_offset;  // of attention
  int64_t bytes;            // in all
};

}  // namespace helm::cuda
