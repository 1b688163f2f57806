// A cuBLAS of a few functions for tests: the plainest kernel, sums in double precision.
#pragma once

#include "cuda/cublas.h"

namespace helm::test {

// Refuses products unless a workspace was set after the stream, where cuBLAS would allocate one,
// and writes to both ends of it.
cuda::BlasApi reference_blas();

int live_blas_handles();
// Of the last product.
int64_t last_blas_workspace_bytes();

}  // namespace helm::test
