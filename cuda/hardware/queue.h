// Where kernels are enqueued, and whether a kernel may begin before the one before it has ended.
#pragma once

#include <cuda_runtime.h>

namespace helm::cuda {

// A stream as kernels are launched into it. With `overlaps` each launch is a programmatic dependent
// one: its blocks may start as soon as all of the kernel before have, so that loads of weights and
// the launch itself hide behind that kernel's end. Every kernel that is launched so calls
// await_previous() (launch.h) in each thread before it reads what other kernels write, and before
// it writes anything. A launch without `overlaps` begins when all before it has ended.
struct Queue {
  cudaStream_t stream;
  bool overlaps = false;

  Queue(cudaStream_t handle, bool overlapping = false)  // NOLINT: a stream is a queue
      : stream(handle), overlaps(overlapping) {}
};

}  // namespace helm::cuda
