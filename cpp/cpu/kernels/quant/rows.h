// Rows of activations to integers, and rows of packed weights to floats, over any vector type.
#pragma once

#include "cpu/kernels/elementwise.h"
#include "cpu/kernels/quant/integer.h"
#include "helm/tiles.h"

namespace helm::cpu {
namespace {

HELM_INLINE void set_sums(QuantBlock& block) {
  int32_t all = 0, last = 0;  // in one loop, of which compilers make vectors
  for (int k = 0; k < kBlockCols; ++k) {
    all += block.q[k];
    last += k < 16 ? 0 : block.q[k];
  }
  const int32_t far = block.far * (1 << kFarShift);
  all += far, last += block.far_col < 16 ? 0 : far;
  const int32_t sums[2] = {all - last, last};
  for (int h = 0; h < 2; ++h) {
    block.minus_sums[h] = -sums[h];
    block.alpha_sums[h] = block.alpha * static_cast<float>(sums[h]);
  }
  block.minus_sum = -all;
  block.alpha_sum = block.alpha * static_cast<float>(all);
}

// x: [32]. Magnitudes are compared as the integers that their bits are.
template <class V>
HELM_INLINE void quantize_block(float (&x)[kBlockCols], QuantBlock& out) {
  constexpr int32_t kInfinity = 0x7f800000;
  int32_t size[kBlockCols], largest = 0;
  __builtin_memcpy(size, x, sizeof size);
  for (int32_t& s : size) s &= 0x7fffffff;
  for (const int32_t s : size) largest = s > largest ? s : largest;
  const float most = f32_from_bits(static_cast<uint32_t>(largest)), half_most = 0.5f * most;
  int32_t half, above = 0;
  __builtin_memcpy(&half, &half_most, sizeof half);
  for (const int32_t s : size) above += s > half;

  float a = most, far = 0;
  out.far = out.far_col = 0;
  if (above == 1) {
    int32_t others = 0, at = 0;
    for (int32_t k = 0; k < kBlockCols; ++k) at += size[k] > half ? k : 0;
    for (const int32_t s : size) {
      const int32_t other = s <= half ? s : 0;
      others = other > others ? other : others;
    }
    a = f32_from_bits(static_cast<uint32_t>(others));
    a = a < most / 127.0f ? most / 127.0f : a;
    out.far_col = static_cast<int16_t>(at);
    far = x[at], x[at] = 0;
  }
  out.alpha = a / 127.0f;
  if (largest >= kInfinity || out.alpha < 0x1p-126f) {
    out.alpha = largest >= kInfinity ? __builtin_nanf("") : 0.0f;
    __builtin_memset(out.q, 0, sizeof out.q);
    return;
  }
  const float inverse = 127.0f / a;
  for (int i = 0; i < kBlockCols; i += V::kLanes) {
    Elem<V, DType::kI8>::store(out.q + i, V::round(V::mul(V::load(x + i), V::set1(inverse))));
  }
  if (above == 1) {
    constexpr float kRounds = 0x1.8p23f;  // what is added to it loses its fraction
    const auto n = static_cast<int>(far * inverse + kRounds - kRounds);
    out.far = static_cast<int16_t>((n + 64) >> kFarShift);
    out.q[out.far_col] = static_cast<int8_t>(n - out.far * (1 << kFarShift));
  }
}

template <class Floats>
void quantize_rows(const QuantizeArgs& args) {
  const int64_t blocks = quant_blocks(args.cols);
  for (int64_t t = 0; t < args.tokens; ++t) {
    const float* x = args.x + t * args.x_stride;
    QuantBlock* out = args.out + t * blocks;
    for (int64_t j = 0; j < blocks; ++j, x += kBlockCols) {
      const int64_t n = min_of(kBlockCols, args.cols - j * kBlockCols);
      float block[kBlockCols] = {};
      if (n == kBlockCols) {
        __builtin_memcpy(block, x, sizeof block);
      } else {
        __builtin_memcpy(block, x, static_cast<size_t>(n) * sizeof(float));
      }
      quantize_block<Floats>(block, out[j]);
      set_sums(out[j]);
    }
  }
}

// The codes of row r of a block, or the numbers that they stand for.
HELM_INLINE void read_codes(Codes codes, const uint8_t* block, int r, int (&out)[kBlockCols]) {
  const int8_t* values = row_of(codes).values;
  for (int k = 0; k < kBlockCols; ++k) {
    const int code = read_code(codes, block, r, k);
    out[k] = values == nullptr ? code : values[code];
  }
}

HELM_INLINE float half_at(const Format& format, const uint8_t* array, int64_t i) {
  uint16_t bits;
  __builtin_memcpy(&bits, array + 2 * i, 2);
  return format.wide ? f32_from_bf16(bits) : f32_from_f16(bits);
}

// The scale of row r in a group of a span and what is added, or subtracted from codes.
struct RowScale {
  float scale = 0, minimum = 0;
  int zero = 0;
};
HELM_INLINE RowScale read_scale(const Format& format, const uint8_t* strip, const uint8_t* span,
                                int64_t n, int64_t group, int r) {
  const int64_t i = group * kStripRows + r;
  const auto second = [&] { return span + group_array_at(format, n, 1); };
  const auto of_span = [&](int which) {
    const uint8_t* array = span + span_array_at(format, n, which);
    return f32_from_f16(static_cast<uint16_t>(array[2 * r] | array[2 * r + 1] << 8));
  };
  RowScale out;
  out.zero = format.offset;
  switch (format.scales) {
    case Scales::kNone:
      break;
    case Scales::kS:
      out.scale = half_at(format, span, i);
      break;
    case Scales::kM:
      out.scale = half_at(format, span, i);
      out.minimum = half_at(format, second(), i);
      break;
    case Scales::kZ:
      out.scale = half_at(format, span, i);
      out.zero = second()[i];
      break;
    case Scales::kE: {
      const uint32_t e = span[i];
      out.scale = f32_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
      break;
    }
    case Scales::kK:
      out.scale = of_span(0) * static_cast<float>(static_cast<int8_t>(span[i]));
      break;
    case Scales::kKM:
      out.scale = of_span(0) * static_cast<float>(span[i]);
      out.minimum = -(of_span(1) * static_cast<float>(second()[i]));
      break;
    case Scales::kR:
      __builtin_memcpy(&out.scale, strip + 4 * r, 4);
      break;
  }
  return out;
}

inline void read_row(const Format& format, const std::byte* strip, int r, int64_t cols,
                     float* out) {
  const auto* base = reinterpret_cast<const uint8_t*>(strip);
  const int64_t group_cols = format.group == 0 ? kSpanCols : format.group;
  for (int64_t k = 0; k < cols; k += kBlockCols) {
    const int64_t in_span = k % kSpanCols, n = span_cols(format, cols, k - in_span);
    const uint8_t* span = base + span_at(format, k - in_span);
    int codes[kBlockCols];
    read_codes(format.codes, span + block_at(format, n, in_span), r, codes);
    RowScale scale;
    for (int64_t i = 0; i < min_of(kBlockCols, cols - k); ++i) {
      if (i % 16 == 0) scale = read_scale(format, base, span, n, (in_span + i) / group_cols, r);
      const float v = scale.scale * static_cast<float>(codes[i] - scale.zero);
      out[k + i] =
          row_of(format.scales).minimum && format.scales != Scales::kZ ? v + scale.minimum : v;
    }
  }
}

}  // namespace
}  // namespace helm::cpu
