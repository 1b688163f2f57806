#include "weights/packed.h"

#include <algorithm>

#include "helm/tiles.h"
#include "weights/finite.h"

namespace helm {
namespace {

// Whether the scales of 16 rows are finite for certain: an exponent of a scale e may be too large
// for some codes alone.
bool finite_for_certain(const Format& format, int64_t n, const std::byte* strip,
                        const std::byte* span) {
  const ScalesRow& scales = row_of(format.scales);
  const auto halves = [&](int64_t at) { return reinterpret_cast<const uint16_t*>(span + at); };
  bool good = format.scales != Scales::kE;
  for (const int which : {0, 1}) {
    if (scales.group_bytes[which] != 2) continue;
    good &= all_finite(halves(group_array_at(format, n, which)), n / format.group * kStripRows,
                       format.wide ? kExponentBF16 : kExponentF16);
  }
  if (scales.span_f16 > 0) {
    good &=
        all_finite(halves(span_array_at(format, n, 0)), scales.span_f16 * kStripRows, kExponentF16);
  }
  if (scales.strip_f32 > 0) {
    good &= all_finite(reinterpret_cast<const uint32_t*>(strip), kStripRows, kExponentF32);
  }
  return good;
}

}  // namespace

void PackedMatrix::check_scales() const {
  const Format& format = exact();
  for (int64_t row = 0; row < rows(); row += kStripRows) {
    const std::byte* strip = matrix_ + strip_at(format, cols(), row / kStripRows);
    for (int64_t col = 0; col < cols(); col += kSpanCols) {
      const int64_t n = span_cols(format, cols(), col);
      if (finite_for_certain(format, n, strip, strip + span_at(format, col))) continue;
      const int64_t end = std::min(row + kStripRows, rows());
      for (int64_t r = row; r < end; ++r) {
        SpanRow values;
        unpack(r, 1, col, n, &values);
        if (!is_finite(format, n, values)) refuse(r, col);
      }
    }
  }
}

void PackedMatrix::unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const {
  for (int i = 0; i < count; ++i) {
    const int64_t r = row + i;
    const std::byte* strip = matrix_ + strip_at(exact(), cols(), r / kStripRows);
    read_span(exact(), n, strip, strip + span_at(exact(), col), static_cast<int>(r % kStripRows),
              to + i);
  }
}

}  // namespace helm
