// Where K and V of a position lie: pages as in cpp/cpu/kv_page.h, found through the step's tables.
#pragma once

#include "kernels.h"
#include "vec.cuh"

namespace helm::cuda {

// The pages of one run in one KV entry, by their first unit.
struct RunPages {
  const int32_t* pages;  // [blocks] at `stride`
  int64_t stride;

  __device__ __forceinline__ RunPages(const StepTables& step, const Run& run, int64_t entry)
      : pages(step.pages + run.first_page + entry), stride(step.entries) {}
};

// Element 0 of a position's K row; its V row lies value_offset() elements on.
template <DType D>
__device__ __forceinline__ Store<D>* key_row(const KvPool& kv, const RunPages& run, int64_t head,
                                             int32_t position) {
  const uint32_t block = kv.page_tokens.divide(static_cast<uint32_t>(position));
  const uint32_t slot =
      static_cast<uint32_t>(position) - block * static_cast<uint32_t>(kv.page_tokens);
  const int64_t unit = run.pages[block * run.stride];
  return static_cast<Store<D>*>(kv.base) +
         ((2 * unit + head) * kv.page_tokens + slot) * kv.head_dim;
}

__device__ __forceinline__ int64_t value_offset(const KvPool& kv) {
  return kv.kv_heads * kv.page_tokens * kv.head_dim;
}

}  // namespace helm::cuda
