// Rows of tensors from their stored encoding to the bytes of a slice. Knows no files and devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cpu/kernels/kernels.h"
#include "helm/plan.h"
#include "helm/stored.h"

namespace helm {

// What is converted on its way comes in parts of so many elements, which stay in cache, so that a
// thread has less than 1 MiB of buffers.
inline constexpr int64_t kPartElements = int64_t{1} << 16;

// Rows of a tensor as they are stored, one after the other.
struct StoredRows {
  const TensorSpec& tensor;
  Stored stored;
  const std::byte* data;
  int64_t first;  // of the tensor's rows
  int64_t count;
  std::string_view file;  // for errors; empty: not known
};

// to: where the first of the rows lies in the slice, which is a multiple of row_unit(format) rows
// from its begin. The format lies row by row or strip by strip, as all but bf16c do. A dense one
// rounds each value once, to nearest even; a packed one is the exact one of what is stored. Throws
// Error{kIo} that names the row where a block has a scale or a weight that is NaN or infinite.
void encode_rows(const StoredRows& from, const Format& format, const cpu::KernelTable& kernels,
                 std::byte* to);

}  // namespace helm
