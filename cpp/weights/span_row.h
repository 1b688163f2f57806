// A span of one row between a checkpoint's encoding and a packed format: codes and scales, one
// after the other. Knows formats, no checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helm/format.h"

namespace helm {

inline constexpr int kMostGroups = 16;  // of a span: groups have 16 columns at least

// Codes, one a byte, and the scales of their groups. A kind of scales (helm/format.h) uses the
// members that stand beside it:
//   s: s                m: s, m             z: s, n (zero points)     e: l (E8M0)
//   k: l (signed), d    km: l, n, d, e      r: row_scale, the same in all spans of a row
struct alignas(64) SpanRow {
  uint8_t code[kSpanCols];
  uint16_t s[kMostGroups];  // bits of f16 or bf16
  uint16_t m[kMostGroups];
  uint8_t l[kMostGroups];
  uint8_t n[kMostGroups];
  uint16_t d;  // bits of f16
  uint16_t e;
  float row_scale;
};

// All of the following: n columns of the span are used, a multiple of col_unit(format).

// Writes 16 rows as a span of a strip; all bytes of it. `span` is aligned to 64 bytes.
void write_span(const Format& format, int64_t n, const SpanRow* rows, std::byte* span);
// Writes what a strip has in front of its spans.
void write_strip_header(const Format& format, const SpanRow* rows, std::byte* strip);

// Reads row r < 16 of a span, what its kind of scales has; a strip's header beside it.
void read_span(const Format& format, int64_t n, const std::byte* strip, const std::byte* span,
               int r, SpanRow* row);

// The values of a row, each by the formula of its kind of scales in f32. out: [n].
void span_values(const Format& format, int64_t n, const SpanRow& row, float* out);

// Whether all scales, and all values, are finite.
bool is_finite(const Format& format, int64_t n, const SpanRow& row);

}  // namespace helm
