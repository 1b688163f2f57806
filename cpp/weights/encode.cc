#include "weights/encode.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/quantize.h"
#include "weights/ggml.h"

namespace helm {
namespace {

// Elements of one dtype to another.
void convert(const cpu::KernelTable& kernels, DType from_dtype, const std::byte* from,
             DType to_dtype, std::byte* to, int64_t n) {
  const auto widen = kernels.widen[static_cast<int>(from_dtype)];
  const auto narrow = kernels.narrow[static_cast<int>(to_dtype)];
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(n * dtype_bytes(from_dtype)));
  } else if (to_dtype == DType::kF32) {
    widen(from, reinterpret_cast<float*>(to), n);
  } else if (from_dtype == DType::kF32) {
    narrow(reinterpret_cast<const float*>(from), to, n);
  } else {
    std::vector<float> wide(static_cast<size_t>(std::min(n, kPartElements)));
    for (int64_t begin = 0; begin < n; begin += kPartElements) {
      const int64_t count = std::min(kPartElements, n - begin);
      widen(from + begin * dtype_bytes(from_dtype), wide.data(), count);
      narrow(wide.data(), to + begin * dtype_bytes(to_dtype), count);
    }
  }
}

GgmlMatrix matrix_of(const StoredRows& from) {
  const int64_t cols = from.tensor.cols(), bytes = stored_bytes(from.stored, cols);
  GgmlMatrix matrix(from.tensor.name, from.stored, {{from.data, from.count, bytes}}, cols,
                    from.first);
  matrix.comes_from(std::string(from.file));
  return matrix;
}

// Without a detour over f32.
void quantize(const StoredRows& from, const Format& format, const cpu::KernelTable& kernels,
              std::byte* to) {
  const auto refused = cpu::quantize_strips(format, dtype_of(from.stored), from.data, from.count,
                                            from.tensor.cols(), kernels, to);
  if (refused) matrix_of(from).refuse_values(*refused, format);
}

}  // namespace

void encode_rows(const StoredRows& from, const Format& format, const cpu::KernelTable& kernels,
                 std::byte* to) {
  const int64_t cols = from.tensor.cols();
  if (is_dense(from.stored) && is_dense(format)) {
    return convert(kernels, dtype_of(from.stored), from.data, dtype_of(format), to,
                   from.count * cols);
  }
  if (is_dense(from.stored) && cpu::quantizes(format)) {
    return quantize(from, format, kernels, to);
  }
  encode(matrix_of(from), format, kernels, 0, from.count, to);
}

}  // namespace helm
