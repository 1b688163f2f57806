// A cuBLAS of a few functions for tests: the plainest kernel, sums in double precision.
#pragma once

#include "cuda/cublas.h"

namespace helm::test {

// Refuses products unless a workspace was set after the stream, where cuBLAS would allocate one.
cuda::BlasApi reference_blas();

int live_blas_handles();

}  // namespace helm::test
