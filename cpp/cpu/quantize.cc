#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "helm/tiles.h"

namespace helm::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kVectors = kBlockCols / kLanes;
// The compiler's own vectors: an order of sums that is the same on every processor.
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

// Weights of 32 columns of a row.
struct Group {
  Floats w[kVectors];
};

Group load(const float* w) {
  Group group;
  std::memcpy(&group, w, sizeof group);
  return group;
}

Floats all(float v) {
  return Floats{} + v;
}
Floats least(Floats a, Floats b) {
  return a < b ? a : b;
}
Floats most(Floats a, Floats b) {
  return a > b ? a : b;
}
// To the nearest integer, ties to even, of |x| < 2^22.
Floats nearest(Floats x) {
  constexpr float kMagic = 12582912.0f;
  return (x + kMagic) - kMagic;
}
float sum(Floats v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}
float largest(Floats v) {
  return std::max({v[0], v[1], v[2], v[3]});
}
float smallest(Floats v) {
  return std::min({v[0], v[1], v[2], v[3]});
}

// Codes of a group, clamped to [low, high], plus `plus`.
void put_codes(const Group& group, float minimum, float inverse, float low, float high, int plus,
               uint8_t* out) {
  for (int i = 0; i < kVectors; ++i) {
    const Floats u = nearest((group.w[i] - minimum) * inverse);
    const Ints codes = __builtin_convertvector(most(least(u, all(high)), all(low)), Ints) + plus;
    for (int lane = 0; lane < kLanes; ++lane) {
      out[i * kLanes + lane] = static_cast<uint8_t>(codes[lane]);
    }
  }
}

uint16_t to_f16(const KernelTable& kernels, float x) {
  uint16_t bits;
  kernels.narrow[static_cast<int>(DType::kF16)](&x, &bits, 1);
  return bits;
}
float from_f16(const KernelTable& kernels, uint16_t bits) {
  float x;
  kernels.widen[static_cast<int>(DType::kF16)](&bits, &x, 1);
  return x;
}

// A scale, and what it is divided by to give codes: 0 where the scale is.
struct F16Scale {
  uint16_t bits;
  float value, inverse;
};
F16Scale f16_scale(const KernelTable& kernels, float x) {
  const uint16_t bits = to_f16(kernels, x);
  const float value = from_f16(kernels, bits);
  return {bits, value, value > 0.0f ? 1.0f / value : 0.0f};
}

// What is written of a span: rows beyond the last stay zeros.
struct Span {
  const KernelTable& kernels;
  const float* w;  // [rows, kSpanCols]
  int rows;
  int64_t n;  // columns, a multiple of kBlockCols
  uint8_t* to;
};

// Codes of row r of a block whose other bits are zeros.
void put_bytes(uint8_t* block, int r, const uint8_t* codes) {
  for (int q = 0; q < 8; ++q) std::memcpy(block + q * kFormatLine + 4 * r, codes + 4 * q, 4);
}
void put_nibbles(uint8_t* block, int r, const uint8_t* codes) {
  for (int k = 0; k < 16; ++k) {
    block[k / 4 * kFormatLine + 4 * r + k % 4] =
        static_cast<uint8_t>(codes[k] | codes[16 + k] << 4);
  }
}

// -1 where all is well, or the row that cannot be had.
int quantize_c8_s32(const Format& format, const Span& span) {
  auto* scales = reinterpret_cast<uint16_t*>(span.to);  // [groups, 16]
  for (int r = 0; r < span.rows; ++r) {
    for (int64_t k = 0; k < span.n; k += kBlockCols) {
      const Group group = load(span.w + r * kSpanCols + k);
      Floats size{};
      for (const Floats& w : group.w) size = most(size, most(w, -w));
      const F16Scale scale = f16_scale(span.kernels, largest(size) / 127.0f);
      if (!std::isfinite(scale.value)) return r;
      scales[k / kBlockCols * kStripRows + r] = scale.bits;
      uint8_t codes[kBlockCols];
      put_codes(group, 0.0f, scale.inverse, -127.0f, 127.0f, 128, codes);
      put_bytes(span.to + block_at(format, span.n, k), r, codes);
    }
  }
  return -1;
}

// w is about scale * u - minimum.
struct Fit {
  float scale = 0, minimum = 0;
};

// Least squares over the codes of a range; false where there is no positive scale.
bool fit_codes(const Group& group, float low, float inverse, float sum_w, Fit* fit, float* gain) {
  Floats u_{}, uu_{}, uw_{};
  for (const Floats& w : group.w) {
    const Floats u = least(nearest((w - low) * inverse), all(15.0f));  // no w is below low
    u_ += u, uu_ += u * u, uw_ += u * w;
  }
  constexpr float kCount = kBlockCols;
  const float u = sum(u_), uu = sum(uu_), uw = sum(uw_), spread = kCount * uu - u * u;
  if (!(spread > 0.0f)) return false;
  float scale = (kCount * uw - u * sum_w) / spread;
  float minimum = (scale * u - sum_w) / kCount;
  if (minimum < 0.0f) minimum = 0.0f, scale = uw / uu;
  *fit = {scale, minimum};
  *gain = scale * uw - minimum * sum_w;  // by which the squares of w are reduced
  return scale > 0.0f;
}

Fit best_fit(const Group& group) {
  constexpr int kRanges = 11;
  Floats low_ = group.w[0], high_ = group.w[0], sum_{};
  for (const Floats& w : group.w) low_ = least(low_, w), high_ = most(high_, w), sum_ += w;
  const float low = std::min(smallest(low_), 0.0f), high = largest(high_), sum_w = sum(sum_);
  if (!(high > low)) return {0.0f, -low};
  Fit best{(high - low) / 15.0f, -low};  // where all weights have one code, or sums overflow
  float most_gain = -INFINITY;
  for (int i = 0; i < kRanges; ++i) {
    const float range = (high - low) * (1.0f - 0.025f * static_cast<float>(i));
    Fit fit;
    float gain;
    if (!fit_codes(group, low, 15.0f / range, sum_w, &fit, &gain) || !(gain > most_gain)) continue;
    most_gain = gain, best = fit;
  }
  return best;
}

uint8_t to_byte(float x) {
  return static_cast<uint8_t>(std::clamp(std::nearbyint(x), 0.0f, 255.0f));
}

int quantize_c4_km32(const Format& format, const Span& span) {
  uint8_t* l = span.to;  // [groups, 16]
  uint8_t* n = span.to + group_array_at(format, span.n, 1);
  auto* d = reinterpret_cast<uint16_t*>(span.to + span_array_at(format, span.n, 0));
  auto* e = reinterpret_cast<uint16_t*>(span.to + span_array_at(format, span.n, 1));
  for (int r = 0; r < span.rows; ++r) {
    const float* w = span.w + r * kSpanCols;
    Fit fits[kSpanCols / kBlockCols];
    Fit top;
    for (int64_t k = 0; k < span.n; k += kBlockCols) {
      Fit& fit = fits[k / kBlockCols] = best_fit(load(w + k));
      if (!std::isfinite(fit.scale) || !std::isfinite(fit.minimum)) return r;
      top = {std::max(top.scale, fit.scale), std::max(top.minimum, fit.minimum)};
    }
    const F16Scale scale = f16_scale(span.kernels, top.scale / 255.0f);
    const F16Scale minimum = f16_scale(span.kernels, top.minimum / 255.0f);
    if (!std::isfinite(scale.value) || !std::isfinite(minimum.value)) return r;
    d[r] = scale.bits, e[r] = minimum.bits;
    for (int64_t k = 0; k < span.n; k += kBlockCols) {
      const Fit& fit = fits[k / kBlockCols];
      const int64_t i = k / kBlockCols * kStripRows + r;
      l[i] = to_byte(fit.scale * scale.inverse), n[i] = to_byte(fit.minimum * minimum.inverse);
      const float s = scale.value * static_cast<float>(l[i]);
      const float low = -(minimum.value * static_cast<float>(n[i]));
      uint8_t codes[kBlockCols];
      put_codes(load(w + k), low, s > 0.0f ? 1.0f / s : 0.0f, 0.0f, 15.0f, 0, codes);
      put_nibbles(span.to + block_at(format, span.n, k), r, codes);
    }
  }
  return -1;
}

struct Quantizer {
  const char* format;
  int (*span)(const Format&, const Span&);
};
constexpr Quantizer kQuantizers[] = {{"c8.s32", quantize_c8_s32}, {"c4.km32", quantize_c4_km32}};

const Quantizer* quantizer_of(const Format& format) {
  for (const Quantizer& quantizer : kQuantizers) {
    if (format == format_from_name(quantizer.format)) return &quantizer;
  }
  return nullptr;
}

// Weights [rows, kSpanCols] from column k on, zeros beyond the last; false for one not finite.
bool widen_span(const std::byte* rows, DType dtype, int64_t cols, int64_t k, int count,
                const KernelTable& kernels, float* out, int* broken) {
  const int64_t n = std::min(kSpanCols, cols - k);
  for (int r = 0; r < count; ++r, out += kSpanCols) {
    kernels.widen[static_cast<int>(dtype)](rows + (r * cols + k) * dtype_bytes(dtype), out, n);
    std::fill(out + n, out + kSpanCols, 0.0f);
    float zero = 0.0f;  // NaN once a weight is not finite
    for (int64_t i = 0; i < kSpanCols; ++i) zero += out[i] * 0.0f;
    if (zero == 0.0f) continue;
    *broken = r;
    return false;
  }
  return true;
}

}  // namespace

bool quantizes(const Format& format) {
  return quantizer_of(format) != nullptr;
}

std::optional<int64_t> quantize_strips(const Format& format, DType dtype, const void* rows,
                                       int64_t count, int64_t cols, const KernelTable& kernels,
                                       std::byte* to) {
  const Quantizer* quantizer = quantizer_of(format);
  if (quantizer == nullptr) {
    fail(ErrorKind::kInvalid, "[quantize] weights are not quantised to ", format_name(format),
         "; use c8.s32 or c4.km32");
  }
  const int64_t bytes = strip_bytes(format, cols);
  const auto* from = static_cast<const std::byte*>(rows);
  std::optional<int64_t> refused;
  float w[kStripRows * kSpanCols];
  for (int64_t row = 0; row < count; row += kStripRows, to += bytes) {
    std::memset(to, 0, static_cast<size_t>(bytes));
    const int some = static_cast<int>(std::min(kStripRows, count - row));
    for (int64_t k = 0; k < cols; k += kSpanCols) {
      int wrong = -1;
      if (widen_span(from + row * cols * dtype_bytes(dtype), dtype, cols, k, some, kernels, w,
                     &wrong)) {
        const Span span{kernels, w, some, span_cols(format, cols, k),
                        reinterpret_cast<uint8_t*>(to) + span_at(format, k)};
        wrong = quantizer->span(format, span);
      }
      if (wrong >= 0) refused = std::min(refused.value_or(count), row + wrong);
    }
    if (refused) return refused;
  }
  return refused;
}

}  // namespace helm::cpu
