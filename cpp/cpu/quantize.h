// HELM's own formats out of weights of 16 or 32 bits. Knows nothing of tensors, files and plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/kernels/kernels.h"
#include "helm/format.h"

namespace helm::cpu {

// Whether quantize_strips() makes this format: c8.s32 and c4.km32.
bool quantizes(const Format& format);

// rows: [count, cols] of dtype, one after the other; to: strip_bytes(format, cols) for every 16 of
// them, aligned to 64. Rows beyond the last are zeros. The bytes depend on the weights alone.
//   c8.s32   s = max |w| / 127 in f16, codes to the nearest
//   c4.km32  for each 32 columns the scale and minimum of least squares over the codes of eleven
//            ranges, the best of them; d and e of 256 columns so that the largest of each is 255;
//            codes to the nearest given the rounded scales. Minima are not above 0.
// Returns the first row that has a weight which is not finite, or too large for scales in f16; the
// bytes are of no use then.
std::optional<int64_t> quantize_strips(const Format& format, DType dtype, const void* rows,
                                       int64_t count, int64_t cols, const KernelTable& kernels,
                                       std::byte* to);

}  // namespace helm::cpu
