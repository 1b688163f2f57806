// A step's tables, pages and runs as the CUDA kernels see them, in guarded host memory: under the
// emulation every host pointer is a device pointer.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "oracle.h"
#include "support/check.h"

namespace helm::test {

inline constexpr DType kAllTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Launched so, a kernel of which a thread does not wait for the kernel before is a fault.
inline const cuda::Queue kOverlapping{nullptr, true};

// Waits for the kernels and requires that none failed.
inline void finish_kernels(const std::string& label) {
  const cudaError_t error = cudaDeviceSynchronize();
  CHECK_MESSAGE(error == cudaSuccess, label << ": " << cuda_emulation::fault());
  CHECK_MESSAGE(cudaGetLastError() == cudaSuccess, label);
  cuda_emulation::clear_fault();
}

struct RunShape {
  int32_t tokens;
  int32_t first_position;
};

// Tables of these runs, with pages of so many units in an order that is not theirs.
struct TestStep {
  TestStep(const std::vector<RunShape>& shapes, int64_t page_tokens, int32_t layers, int64_t units,
           uint32_t seed)
      : tokens(std::accumulate(shapes.begin(), shapes.end(), int64_t{0},
                               [](int64_t sum, const RunShape& s) { return sum + s.tokens; })),
        positions(tokens),
        row_runs(tokens),
        runs(static_cast<int64_t>(shapes.size())),
        pages(pages_of(shapes, page_tokens, layers)) {
    std::vector<int32_t> order(static_cast<size_t>(pages.size()));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    std::ranges::transform(order, pages.data(),
                           [&](int32_t page) { return static_cast<int32_t>(page * units); });
    int32_t row = 0, page = 0;
    for (size_t r = 0; r < shapes.size(); ++r) {
      const RunShape& s = shapes[r];
      const int64_t blocks = pages_of({s}, page_tokens, 1);
      runs.data()[r] = {row, s.tokens, s.first_position, page, 0, static_cast<int32_t>(blocks)};
      for (int32_t t = 0; t < s.tokens; ++t, ++row) {
        positions.data()[row] = s.first_position + t;
        row_runs.data()[row] = static_cast<int32_t>(r);
      }
      page += static_cast<int32_t>(pages_of({s}, page_tokens, layers));
    }
    tables.positions = positions.data();
    tables.row_runs = row_runs.data();
    tables.runs = runs.data();
    tables.pages = pages.data();
    tables.entries = layers;
  }

  static int64_t pages_of(const std::vector<RunShape>& shapes, int64_t page_tokens,
                          int64_t layers) {
    int64_t pages = 0;
    for (const RunShape& s : shapes) {
      pages += ((s.first_position + s.tokens - 1) / page_tokens + 1) * layers;
    }
    return pages;
  }

  // Index in the pool, in elements, of element 0 of K (V if `value`) of a position.
  int64_t row_at(const cuda::KvPool& kv, size_t run, int64_t layer, int64_t head, int64_t position,
                 bool value) const {
    const int64_t block = position / kv.page_tokens, slot = position % kv.page_tokens;
    const int64_t unit = pages.data()[runs.data()[run].first_page + block * tables.entries + layer];
    const int64_t slab = head + (value ? kv.kv_heads : 0);
    return ((2 * unit + slab) * kv.page_tokens + slot) * kv.head_dim;
  }

  int64_t tokens;
  Guarded<int32_t> positions, row_runs;
  Guarded<cuda::Run> runs;
  Guarded<int32_t> pages;
  cuda::StepTables tables{};
};

}  // namespace helm::test
