// Kernel launches and the few device operations that have no CUDA C++ spelling, for real devices.
// cuda/emulation/launch.h is the same on the host; the include path chooses.
#pragma once

#include <cuda_runtime.h>

#include "queue.h"

namespace helm::cuda {

// kernel<<<grid, block, shared_bytes, queue.stream>>>(args...)
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            const Queue& queue, const Args&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = queue.stream;
  config.attrs = &overlap;
  config.numAttrs = queue.overlaps ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, args...);
}

// The next kernel of the queue may begin, if it is launched to overlap. It still waits for the end
// of this one, so that this may stand first in a kernel.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before have ended and what they wrote is visible. Loads that the compiler
// may move (__ldg, load_streaming) are for what no kernel writes.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The block's dynamic shared memory, aligned to 16 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 helm_dynamic_shared[];
  return reinterpret_cast<T*>(helm_dynamic_shared);
}

// Sixteen or four bytes that are read once: they should not push other data out of L1.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
__device__ __forceinline__ unsigned load_streaming(const unsigned* p) {
  unsigned v;
  asm("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// 2^x to two units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one unit in the last place; 0 for an infinite x.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace helm::cuda
