// What the tiles of a product share: its shape, and spans of some strips with their scales as
// floats.
#pragma once

#include "cpu/kernels/quant/headers.h"
#include "cpu/kernels/quant/integer.h"
#include "cpu/kernels/quant/unrolled.h"

namespace helm::cpu {
namespace {

// What of a format decides how its products are computed.
struct Kind {
  Codes codes;
  int offset;
  bool halves;  // in groups of 16: two sums per block
  bool minimum;

  constexpr bool operator==(const Kind&) const = default;
};
constexpr Kind kind_of(const Format& format) {
  return {format.codes, format.offset, format.group == 16, row_of(format.scales).minimum};
}

// What all tiles of a product share.
struct ProductShape {
  const QuantArgs& args;
  ReadScales read_scales;
  int64_t blocks;  // of a row of activations
  int64_t strip_bytes, strip_header;
  SpanLayout whole, last;  // of the spans
  int group_shift;         // a group has so many blocks, as a power of two

  ProductShape(const QuantArgs& a, ReadScales read)
      : args(a),
        read_scales(read),
        blocks(quant_blocks(a.cols)),
        strip_bytes(helm::strip_bytes(a.format, a.cols)),
        strip_header(strip_header_bytes(a.format)),
        whole(a.format, kSpanCols),
        last(a.format, span_cols(a.format, a.cols, (a.cols - 1) / kSpanCols * kSpanCols)),
        group_shift(a.format.group == 0 ? log2_of(kSpanCols / kBlockCols)
                                        : log2_of(a.format.group / kBlockCols)) {}

  const uint8_t* strip(int64_t index) const {
    return reinterpret_cast<const uint8_t*>(args.strips) + index * strip_bytes;
  }
  const uint8_t* span(int64_t strip_index, int64_t block) const {
    return strip(strip_index) + strip_header + block / (kSpanCols / kBlockCols) * whole.bytes;
  }
  const QuantBlock* row_of_a(int64_t t) const {
    return args.a + (args.a_rows == nullptr ? t : args.a_rows[t]) * blocks;
  }
};

// C of the rows of a strip, before the first span [C] + [bias], zeros beyond the last row. Apart
// from tiles, which are many.
__attribute__((noinline)) void begin_rows(const QuantArgs& m, bool first_span, int64_t row,
                                          int64_t first, float* out) {
  const float* c = m.accumulate || !first_span ? m.c + row * m.c_stride + first : nullptr;
  const float* bias = m.bias == nullptr || !first_span ? nullptr : m.bias + first;
  for (int64_t i = 0; i < kStripRows; ++i) {
    const bool valid = first + i < m.rows;
    const float v = valid && c != nullptr ? c[i] : 0.0f;
    out[i] = !valid || bias == nullptr ? v : c == nullptr ? bias[i] : v + bias[i];
  }
}

// Floats of the scales of a strip's span: of at most 16 groups.
template <Kind K>
inline constexpr int64_t kScaleFloats = (K.halves ? 16 : 8) * kStripRows;

// One span of up to kMostStrips strips: strip, strip + step, ...
template <Kind K>
struct Span {
  static constexpr int kMostStrips = 4;
  int64_t strip, step;
  int64_t block;   // of the activations, where it begins
  int64_t blocks;  // of the span
  int64_t bytes;   // from one span to the next
  int64_t header;  // of these
  const uint8_t* codes[kMostStrips];
  alignas(64) float scales[kMostStrips][kScaleFloats<K>];
  alignas(64) float minima[K.minimum ? kMostStrips : 1][kScaleFloats<K>];

  void read(const ProductShape& shape, int64_t first_strip, int64_t apart, int strips,
            int64_t first_block) {
    constexpr int64_t kMostBlocks = kSpanCols / kBlockCols;
    strip = first_strip, step = apart, block = first_block;
    const int64_t left = shape.blocks - block;
    blocks = min_of(left, kMostBlocks);
    const SpanLayout& layout = left > kMostBlocks ? shape.whole : shape.last;
    bytes = layout.bytes, header = layout.codes;
    for (int s = 0; s < strips; ++s) {
      const uint8_t* begin = shape.strip(strip + s * step);
      const uint8_t* at = shape.span(strip + s * step, block);
      shape.read_scales(layout, {begin, at, scales[s], minima[K.minimum ? s : 0]});
      codes[s] = at + layout.codes;
    }
  }
  void fetch_next_headers(int strips) const {
    for (int s = 0; s < strips; ++s) {
      for (int64_t i = 0; i < header; i += kFormatLine) {
        __builtin_prefetch(codes[s] - header + bytes + i, 0, 0);
      }
    }
  }
};

}  // namespace
}  // namespace helm::cpu
