#include "weights/packed.h"

#include "helm/tiles.h"

namespace helm {

void PackedMatrix::unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const {
  for (int i = 0; i < count; ++i) {
    const int64_t r = row + i;
    const std::byte* strip = matrix_ + strip_at(exact(), cols(), r / kStripRows);
    read_span(exact(), n, strip, strip + span_at(exact(), col), static_cast<int>(r % kStripRows),
              to + i);
  }
}

}  // namespace helm
