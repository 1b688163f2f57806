// Codes and scales of packed weights in registers, one row of a block of 32 columns per thread:
// sixteen threads read a line of 64 bytes together.
#pragma once

#include <utility>

#include "packed.h"
#include "vec.cuh"

namespace helm::cuda {

inline constexpr int kRowsOfStrip = static_cast<int>(kStripRows);
inline constexpr int kBlocksOfSpan = static_cast<int>(kSpanCols / kBlockCols);
inline constexpr int kQuads = static_cast<int>(kBlockCols / 4);  // of a row of a block

// Words that a row of a block takes.
template <Codes C>
inline constexpr int kCodeWords = row_of(C).bits;
template <Codes C>
inline constexpr bool kTabled = row_of(C).values != nullptr;
template <Scales S>
inline constexpr bool kHasMinimum = row_of(S).minimum;
// What numbers() subtracts from codes.
template <Codes C>
inline constexpr int kBelow = C == Codes::kC8 ? 128 : 0;

// `first`: of four of a table's numbers.
constexpr unsigned table_word(const int8_t* values, int first) {
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= static_cast<unsigned>(static_cast<uint8_t>(values[first + i])) << 8 * i;
  }
  return word;
}
template <Codes C, int First>
inline constexpr unsigned kTableWord = table_word(row_of(C).values, First);

// The numbers of four codes, the low halves of a word's halves of bytes, as bytes.
template <Codes C>
__device__ __forceinline__ unsigned look_up(unsigned codes) {
  const unsigned within = codes & 0x7777u;  // of eight numbers
  const unsigned low = __byte_perm(kTableWord<C, 0>, kTableWord<C, 4>, within);
  const unsigned high = __byte_perm(kTableWord<C, 8>, kTableWord<C, 12>, within);
  return __byte_perm(low, high, 0x3210u | (codes & 0x8888u) >> 1);
}

template <Codes C>
__device__ __forceinline__ void load_codes(const uint8_t* block, int row, unsigned* words) {
  const auto* from = reinterpret_cast<const unsigned*>(block) + row;
#pragma unroll
  for (int i = 0; i < kCodeWords<C>; ++i) words[i] = load_streaming(from + i * kRowsOfStrip);
}

// quads[i]: of columns 4 i to 4 i + 3, signed bytes that are the codes less kBelow, or the numbers
// of a table.
template <Codes C>
__device__ __forceinline__ void numbers(const unsigned* words, unsigned (&quads)[kQuads]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (C == Codes::kC8) {
      quads[i] = words[i] ^ 0x80808080u;
      quads[i + 4] = words[i + 4] ^ 0x80808080u;
    } else if constexpr (kTabled<C>) {
      const unsigned first = look_up<C>(words[i]), second = look_up<C>(words[i] >> 16);
      quads[i] = __byte_perm(first, second, 0x6420u);
      quads[i + 4] = __byte_perm(first, second, 0x7531u);
    } else {
      quads[i] = words[i] & 0x0f0f0f0fu;
      quads[i + 4] = words[i] >> 4 & 0x0f0f0f0fu;
      if constexpr (C == Codes::kC5) {
        quads[i] |= (words[4] >> i & 0x01010101u) << 4;
        quads[i + 4] |= (words[4] >> (i + 4) & 0x01010101u) << 4;
      }
      if constexpr (C == Codes::kC6) {
        quads[i] |= (words[4] >> 2 * i & 0x03030303u) << 4;
        quads[i + 4] |= (words[5] >> 2 * i & 0x03030303u) << 4;
      }
    }
  }
}

// Where a strip, its span and the block of a thread lie.
struct PackedPlace {
  const uint8_t* strip;
  const uint8_t* span;
  PackedSpan layout;
  int block;  // of the span

  __device__ __forceinline__ PackedPlace(const PackedMatrix& m, int64_t strip_index,
                                         int64_t block_index)
      : strip(m.strips + strip_index * m.strip_bytes),
        span(strip + m.strip_header + block_index / kBlocksOfSpan * m.span_bytes),
        layout(block_index / kBlocksOfSpan == m.last_span ? m.last : m.whole),
        block(static_cast<int>(block_index % kBlocksOfSpan)) {}

  template <Codes C>
  __device__ __forceinline__ const uint8_t* codes() const {
    return span + layout.codes + block * kCodeWords<C> * static_cast<int>(kFormatLine);
  }
  // Of a half of the block where groups have 16 columns.
  __device__ __forceinline__ int group(const PackedMatrix& m, int half) const {
    return m.halves ? 2 * block + half : block >> m.group_shift;
  }
};

// A weight is scale (number - zero) + minimum, but for what numbers() subtracts.
struct RowScale {
  float scale, minimum;
  int zero;
};

template <Scales S>
__device__ __forceinline__ RowScale read_scale(const PackedMatrix& m, const PackedPlace& at,
                                               int group, int row) {
  const int i = group * kRowsOfStrip + row;
  const uint8_t* second = at.span + at.layout.second;
  const auto half = [](const uint8_t* array, int index) {
    return __half2float(__ushort_as_half(__ldg(reinterpret_cast<const uint16_t*>(array) + index)));
  };
  const auto of_group = [&](const uint8_t* array) {
    if (!m.wide) return half(array, i);
    return widen<DType::kBF16>(__ldg(reinterpret_cast<const uint16_t*>(array) + i));
  };
  const auto of_span = [&](int which) {
    return half(at.span + at.layout.of_span, which * kRowsOfStrip + row);
  };
  RowScale out{0, 0, m.offset};
  if constexpr (S == Scales::kS || S == Scales::kM || S == Scales::kZ)
    out.scale = of_group(at.span);
  if constexpr (S == Scales::kM) out.minimum = of_group(second);
  if constexpr (S == Scales::kZ) out.zero = __ldg(second + i);
  if constexpr (S == Scales::kE) {
    const unsigned e = __ldg(at.span + i);
    out.scale = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  if constexpr (S == Scales::kK) {
    out.scale = of_span(0) * static_cast<float>(static_cast<int8_t>(__ldg(at.span + i)));
  }
  if constexpr (S == Scales::kKM) {
    out.scale = of_span(0) * static_cast<float>(__ldg(at.span + i));
    out.minimum = -(of_span(1) * static_cast<float>(__ldg(second + i)));
  }
  if constexpr (S == Scales::kR) {
    out.scale = __ldg(reinterpret_cast<const float*>(at.strip) + row);
  }
  return out;
}

// f(tag) with tag::kCodes, tag::kScales and tag::kHalves those of the matrix, constants.
template <Codes C, Scales S, bool Halves>
struct PackedKind {
  static constexpr Codes kCodes = C;
  static constexpr Scales kScales = S;
  static constexpr bool kHalves = Halves;
};
template <int Row, class F>
bool with_kind_of(const PackedMatrix& m, const F& f) {
  constexpr Format kFormat = kFormats[Row].format;
  if constexpr (is_packed(kFormat)) {
    constexpr bool kHalves = kFormat.group == 16;
    if (m.codes == kFormat.codes && m.scales == kFormat.scales && m.halves == kHalves) {
      f(PackedKind<kFormat.codes, kFormat.scales, kHalves>{});
      return true;
    }
  }
  return false;
}
template <class F, int... Rows>
void with_kind(const PackedMatrix& m, const F& f, std::integer_sequence<int, Rows...>) {
  static_cast<void>((with_kind_of<Rows>(m, f) || ...));
}
template <class F>
void with_kind(const PackedMatrix& m, const F& f) {
  with_kind(m, f, std::make_integer_sequence<int, sizeof(kFormats) / sizeof(kFormats[0])>());
}

}  // namespace helm::cuda
