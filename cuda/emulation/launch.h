// Kernel launches and the few device operations that have no CUDA C++ spelling, emulated.
// cuda/hardware/launch.h is the same for real devices; the include path chooses.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cuda/hardware/queue.h"

namespace cuda_emulation {

// Runs `thread` for every thread of the grid, on the stream. Sets the last error at a bad shape.
// overlaps: a programmatic dependent launch, of which each thread has to wait for the kernel
// before.
void enqueue_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                    cudaStream_t stream, bool overlaps, std::function<void()> thread);

}  // namespace cuda_emulation

namespace helm::cuda {

// kernel<<<grid, block, shared_bytes, queue.stream>>>(args...)
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            const Queue& queue, const Args&... args) {
  cuda_emulation::enqueue_launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes,
                                 queue.stream, queue.overlaps, [=] { kernel(args...); });
}

// The next kernel of the queue may begin. Here it begins when this one has ended.
inline void let_next_begin() {}

// Waits until the kernels before have ended and what they wrote is visible.
inline void await_previous() {
  cuda_emulation::await_previous();
}

// The block's dynamic shared memory, aligned to 16 bytes.
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(cuda_emulation::dynamic_shared_memory());
}

// Sixteen or four bytes that are read once: they should not push other data out of L1.
inline uint4 load_streaming(const uint4* p) {
  return __ldg(p);
}
inline unsigned load_streaming(const unsigned* p) {
  return __ldg(p);
}

// 2^x to two units in the last place; results below 2^-126 are 0.
inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}

// 1 / x to one unit in the last place; 0 for an infinite x.
inline float reciprocal_fast(float x) {
  return 1 / x;
}

}  // namespace helm::cuda
