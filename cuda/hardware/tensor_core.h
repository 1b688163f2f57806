// Products of small matrices by a warp and copies that run beside it, for real devices.
// cuda/emulation/tensor_core.h is the same on the host; the include path chooses.
//
// Fragments are those of the PTX ISA for mma.m16n8k16. With g = lane / 4 and i = lane % 4, each
// register holds two neighbours, the first in its lower half:
//   a [16, 16]  a0: row g, columns 2i    a1: row g + 8    a2, a3: the same, eight columns on
//   b [16, 8]   b0: rows 2i, column g    b1: eight rows on
//   c [16, 8]   c0, c1: row g, columns 2i and 2i + 1      c2, c3: row g + 8
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace helm::cuda {

// x in the lower half, y in the upper one, to nearest even.
__device__ __forceinline__ unsigned pair_f16(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&both);
}
// From sm_80 on, as multiply_bf16.
__device__ __forceinline__ unsigned pair_bf16(float x, float y) {
  unsigned both = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
#endif
  return both;
}

// c += a b. All lanes of a warp take part.
__device__ __forceinline__ void multiply_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  constexpr auto kHalf = [](float (&to)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
        : "r"(a0), "r"(a1), "r"(b));
  };
  kHalf(c, a[0], a[1], b0);
  kHalf(c, a[2], a[3], b1);
#endif
}
__device__ __forceinline__ void multiply_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four matrices [8, 8] of 16-bit elements from shared memory. Lane l has the address of row l % 8
// of matrix l / 8, aligned to 16 bytes. It gets of each matrix elements 2i and 2i + 1 of row g, or
// `transposed`, of column g.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Copies 16 bytes, both ends aligned to them, from global to shared memory. The bytes are there
// once the thread has awaited the group that the copy was committed to; other threads see them
// after a barrier. Before sm_80 the thread itself moves them, at once.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most `kGroups` of this thread's groups, the latest, are on their way.
template <int kGroups>
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

// x, of which the compiler knows nothing: what follows from x is not kept in registers around a
// loop.
__device__ __forceinline__ int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace helm::cuda
