// Making compressed matrices, and reading single weights of them; see cpu/kernels/compressed.h.
#pragma once

#include <atomic>

#include "cpu/kernels/kernels.h"

namespace helm::cpu {

// Fills a compressed matrix row by row, in any order, by any number of threads.
class Compression {
 public:
  // to: CompressedMatrix::bytes(rows, cols), aligned to a cache line.
  Compression(std::byte* to, int64_t rows, int64_t cols)
      : chunks_(to),
        rows_(to + CompressedMatrix::rows_at(rows, cols)),
        escapes_(to + CompressedMatrix::escapes_at(rows, cols)),
        cols_(cols),
        most_(most_escapes(rows, cols)) {}

  // A row from its bf16 weights. False, and the matrix is of no use, if there is no room for the
  // escapes of all.
  bool put(const KernelTable& kernels, int64_t row, const uint16_t* weights);

 private:
  std::byte* chunks_;
  std::byte* rows_;
  std::byte* escapes_;
  int64_t cols_;
  int64_t most_;
  std::atomic<int64_t> taken_{0};  // escapes
};

// Makes a compressed matrix of whatever bytes lie at `data`, without escapes, for probes.
void make_compressed_noise(std::byte* data, int64_t rows, int64_t cols);

// n weights of a row, the first in column `col`, as they were; compressed by the same kernels.
void read_compressed(const KernelTable& kernels, const CompressedMatrix& matrix, int64_t row,
                     int64_t col, int64_t n, uint16_t* out);

}  // namespace helm::cpu
