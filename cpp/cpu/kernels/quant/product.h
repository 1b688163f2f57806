// IntegerTable::product over any vector type of integers: tiles of T tokens and S strips, each of
// which runs along the columns with all its sums in registers.
#pragma once

#include "cpu/kernels/quant/headers.h"
#include "cpu/kernels/quant/operands.h"
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
  int64_t row_of_token(int64_t t) const {
    return args.token_rows == nullptr ? t : args.token_rows[t];
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
    for (int s = 0; s < strips; ++s) {
      const uint8_t* begin = shape.strip(strip + s * step);
      const uint8_t* at = begin + shape.strip_header + block / kMostBlocks * shape.whole.bytes;
      shape.read_scales(layout, {begin, at, scales[s], minima[K.minimum ? s : 0]});
      codes[s] = at + layout.codes;
    }
  }
};

// Tokens token, token + 1, ... times some strips of a span.
template <class V, Kind K, int T, int S>
struct Tile {
  using F = typename V::F;
  using I = typename V::I;
  using Op = Operands<V, K.codes>;
  using Bytes = typename V::template Bytes<Op::kSigned>;
  static constexpr int P = kStripRows / V::kRows;  // vectors side by side in a strip
  static constexpr bool kHalves = K.halves;        // else one sum per block
  static constexpr int kProducts = kHalves ? 4 : 8;
  using Sum = typename V::template Sum<Op::kSigned, Op::kMost, kProducts>;
  static constexpr int kOffset = K.offset + Op::kPlus;
  // One or two streams are asked for so far ahead, beyond the strip's end too; more run by
  // themselves.
  static constexpr int64_t kAhead = S > 2 ? 0 : T == 1 ? V::kAheadOfOne : 1024;
  static constexpr int64_t kBlockBytes = row_of(K.codes).bits * kFormatLine;

  // What moves on is one offset for all tokens and one for all strips. Scales lie apart from the
  // sums, so that compilers keep these in registers.
  const std::byte* a[T];    // the rows of QuantBlock
  const uint8_t* codes[S];  // of the span
  int64_t a_at, codes_at;   // of the block
  const float* scales[S];
  const float* minima[S];
  F c[T][S][P];

  // body(s, p) for all vectors of rows.
  template <class Body>
  HELM_INLINE static void each_vector(Body body) {
    HELM_UNROLL
    for (int s = 0; s < S; ++s) {
      HELM_UNROLL
      for (int p = 0; p < P; ++p) body(s, p);
    }
  }

  // The n-th product of the sums of a block or, in groups of 16, of one of its halves.
  template <int kHalf, int n>
  HELM_INLINE void multiply(Sum (&sum)[T][S][P]) const {
    constexpr int Q = kHalves                 ? kHalf * 4 + n
                      : K.codes == Codes::kC8 ? n
                                              : n / 2 + n % 2 * 4;  // both halves of a line
    fetch<kHalf * kProducts + n>();
    if constexpr (S == 1 && T > 1) {
      const Bytes first(Op::template quad<Q>(line(0)));
      const Bytes second(P == 1 ? first
                                : Bytes(Op::template quad<Q>(line(0) + kFormatLine / P * (P - 1))));
      HELM_UNROLL
      for (int t = 0; t < T; ++t) {
        const I x = V::set4(block(t).q + 4 * Q);
        sum[t][0][0].template add<n>(first, x);
        if constexpr (P > 1) sum[t][0][P - 1].template add<n>(second, x);
      }
    } else {
      I x[T];
      HELM_UNROLL
      for (int t = 0; t < T; ++t) x[t] = V::set4(block(t).q + 4 * Q);
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        const Bytes w(Op::template quad<Q>(line(s) + p * V::kRows * 4));
        HELM_UNROLL
        for (int t = 0; t < T; ++t) sum[t][s][p].template add<n>(w, x[t]);
      });
    }
  }
  // The n-th of eight shares of a block's lines, further on.
  template <int n>
  HELM_INLINE void fetch() const {
    constexpr int kLines = row_of(K.codes).bits;
    if constexpr (kAhead > 0) {
      HELM_UNROLL
      for (int s = 0; s < S; ++s) {
        HELM_UNROLL
        for (int i = n * kLines / 8; i < (n + 1) * kLines / 8; ++i) {
          __builtin_prefetch(line(s) + kAhead + i * kFormatLine);
        }
      }
    }
  }

  // What a block's n has beyond a byte, in one column at most.
  template <int kHalf>
  HELM_INLINE void add_far(Sum (&sum)[T][S][P]) const {
    int32_t any = block(0).far;
    HELM_UNROLL
    for (int t = 1; t < T; ++t) any |= block(t).far;
    if (any == 0) [[likely]]
      return;
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      const QuantBlock& b = block(t);
      if (b.far == 0 || (kHalves && b.far_col / 16 != kHalf)) continue;
      const int quad = b.far_col / 4;
      const I x = V::set1_int((b.far & 0xff) << b.far_col % 4 * 8);
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        typename V::template Sum<Op::kSigned, Op::kMost, 1> far;
        far.template add<0>(Bytes(Op::quad_at(line(s) + p * V::kRows * 4, quad)), x);
        I& total = sum[t][s][p].total;
        total = V::add_ints(total, V::template shift_left<kFarShift>(far.total));
      });
    }
  }

  // A block's sums of one group go into c.
  template <int kHalf>
  HELM_INLINE void add_group(int64_t group) {
    Sum sum[T][S][P];
    each_index<kProducts>([&](auto n)
                              HELM_LAMBDA_INLINE { multiply<kHalf, decltype(n)::value>(sum); });
    add_far<kHalf>(sum);
    each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
      const int64_t place = group * kStripRows + p * V::kRows;
      const F scale = V::load(scales[s] + place);
      HELM_UNROLL
      for (int t = 0; t < T; ++t) {
        const F v = V::float_of(without_offset<kHalf>(sum[t][s][p].total, block(t)));
        c[t][s][p] = V::fma(v, V::mul(scale, V::set1(block(t).alpha)), c[t][s][p]);
        if constexpr (K.minimum) {
          const F x = V::set1(kHalves ? block(t).alpha_sums[kHalf] : block(t).alpha_sum);
          c[t][s][p] = V::fma(V::load(minima[s] + place), x, c[t][s][p]);
        }
      }
    });
  }
  template <int kHalf>
  HELM_INLINE static I without_offset(I total, const QuantBlock& block) {
    if constexpr (kOffset == 0) return total;
    const I minus = V::set1_int(kHalves ? block.minus_sums[kHalf] : block.minus_sum);
    constexpr int kShift = log2_of(kOffset > 0 ? kOffset : -kOffset);
    static_assert(kOffset == 0 || 1 << kShift == (kOffset > 0 ? kOffset : -kOffset));
    const I times = V::template shift_left<kShift>(minus);
    return kOffset > 0 ? V::add_ints(total, times) : V::sub_ints(total, times);
  }

  HELM_INLINE void add_span(int64_t blocks, int group_shift) {
    for (int64_t j = 0; j < blocks; ++j) {
      if constexpr (kHalves) {
        add_group<0>(2 * j);
        add_group<1>(2 * j + 1);
      } else {
        add_group<0>(j >> group_shift);
      }
      a_at += static_cast<int64_t>(sizeof(QuantBlock));
      codes_at += kBlockBytes;
    }
  }
  HELM_INLINE const QuantBlock& block(int t) const {
    return *reinterpret_cast<const QuantBlock*>(a[t] + a_at);
  }
  HELM_INLINE const uint8_t* line(int s) const { return codes[s] + codes_at; }

  // first_of_span: which of the span's strips is the tile's first.
  __attribute__((noinline)) static void run(const ProductShape& shape, const Span<K>& span,
                                            int first_of_span, int64_t token) {
    static_assert(S <= Span<K>::kMostStrips);
    Tile tile;
    HELM_UNROLL
    for (int s = 0; s < S; ++s) {
      const int i = first_of_span + s;
      tile.codes[s] = span.codes[i], tile.scales[s] = span.scales[i];
      tile.minima[s] = span.minima[K.minimum ? i : 0];
    }
    tile.a_at = tile.codes_at = 0;
    int64_t rows[T];
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      rows[t] = shape.row_of_token(token + t);
      tile.a[t] =
          reinterpret_cast<const std::byte*>(shape.args.a + rows[t] * shape.blocks + span.block);
      HELM_UNROLL
      for (int s = 0; s < S; ++s) {
        begin(shape.args, span.block == 0, rows[t], span.strip + (first_of_span + s) * span.step,
              tile.c[t][s]);
      }
    }
    tile.add_span(span.blocks, shape.group_shift);
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      HELM_UNROLL
      for (int s = 0; s < S; ++s) {
        end(shape.args, rows[t], span.strip + (first_of_span + s) * span.step, tile.c[t][s]);
      }
    }
  }

  // C before a span, of the first [C] + [bias], zeros beyond the last row;
  HELM_INLINE static void begin(const QuantArgs& m, bool first_span, int64_t row, int64_t strip,
                                F (&v)[P]) {
    const int64_t first = strip * kStripRows;
    const float* c = m.c + row * m.c_stride + first;
    float some[kStripRows];
    if (first + kStripRows > m.rows) {
      begin_rows(m, first_span, row, first, some);
      c = some, first_span = false;
    }
    const bool from_zero = first_span && !m.accumulate;
    const float* bias = first_span && m.bias != nullptr ? m.bias + first : nullptr;
    HELM_UNROLL
    for (int p = 0; p < P; ++p) {
      v[p] = from_zero ? V::set1(0.0f) : V::load(c + p * V::kRows);
      if (bias != nullptr) {
        const F b = V::load(bias + p * V::kRows);
        v[p] = from_zero ? b : V::add(v[p], b);
      }
    }
  }
  // and after it.
  HELM_INLINE static void end(const QuantArgs& m, int64_t row, int64_t strip, const F (&v)[P]) {
    const int64_t first = strip * kStripRows, n = min_of(kStripRows, m.rows - first);
    float* c = m.c + row * m.c_stride + first;
    float some[kStripRows];
    HELM_UNROLL
    for (int p = 0; p < P; ++p) V::store((n == kStripRows ? c : some) + p * V::kRows, v[p]);
    if (n < kStripRows) __builtin_memcpy(c, some, static_cast<size_t>(n) * sizeof(float));
  }
};

// One tile of tokens times S strips, all their spans.
template <class V, Kind K, int T, int S>
void run_strips(const ProductShape& shape, int64_t strip, int64_t step) {
  Span<K> span;
  for (int64_t block = 0; block < shape.blocks; block += kSpanCols / kBlockCols) {
    span.read(shape, strip, step, S, block);
    Tile<V, K, T, S>::run(shape, span, 0, 0);
  }
}

// One tile of tokens: S strips at a time, as far apart as they can be.
template <class V, Kind K, int T>
void few_tokens(const ProductShape& shape, int64_t strips) {
  constexpr int S = V::kStripsPerTokens[T];
  const QuantArgs& m = shape.args;
  const int64_t step = strips / S, end = step * (m.slice + 1) / m.slices;
  for (int64_t i = step * m.slice / m.slices; i < end; ++i) {
    run_strips<V, K, T, S>(shape, i, step);
  }
  if (m.slice + 1 < m.slices) return;
  for (int64_t i = S * step; i < strips; ++i) run_strips<V, K, T, 1>(shape, i, 0);
}

// All tokens times adjacent strips, S of which are one tile: each span of these stays in L1 while
// tile after tile of tokens passes it.
template <class V, Kind K, int S>
void many_tokens(const ProductShape& shape, int64_t strip, int strips) {
  const QuantArgs& m = shape.args;
  Span<K> span;
  for (int64_t block = 0; block < shape.blocks; block += kSpanCols / kBlockCols) {
    span.read(shape, strip, 1, strips, block);
    int64_t t = 0;
    for (; t + V::kTileTokens <= m.tokens; t += V::kTileTokens) {
      for (int s = 0; s < strips; s += S) Tile<V, K, V::kTileTokens, S>::run(shape, span, s, t);
    }
    each_index<V::kTileTokens - 1>([&](auto rest) {
      constexpr int T = decltype(rest)::value + 1;
      if (m.tokens - t != T) return;
      for (int s = 0; s < strips; s += S) Tile<V, K, T, S>::run(shape, span, s, t);
    });
  }
}

template <class V, Kind K>
void tiles_of_tokens(const ProductShape& shape, int64_t strips) {
  constexpr int64_t kMostFew = 8;
  constexpr int kFew = V::kStripsPerTokens[V::kTileTokens], kMany = V::kPromptStrips;
  static_assert(kMany % kFew == 0);
  const QuantArgs& m = shape.args;
  const bool few = m.tokens <= kMostFew;
  const int64_t together = few ? kFew : kMany, places = (strips + together - 1) / together;
  const int64_t last = min_of(strips, places * (m.slice + 1) / m.slices * together);
  int64_t i = places * m.slice / m.slices * together;
  for (; !few && i + kMany <= last; i += kMany) many_tokens<V, K, kFew>(shape, i, kMany);
  for (; i + kFew <= last; i += kFew) many_tokens<V, K, kFew>(shape, i, kFew);
  for (; i < last; ++i) many_tokens<V, K, 1>(shape, i, 1);
}

// IntegerTable::product of one kind of format.
template <class V, Kind K>
void product_of(const QuantArgs& m, ReadScales read_scales) {
  const ProductShape shape(m, read_scales);
  const int64_t strips = (m.rows + kStripRows - 1) / kStripRows;
  if (m.tokens > V::kTileTokens) return tiles_of_tokens<V, K>(shape, strips);
  each_index<V::kTileTokens>([&](auto index) {
    constexpr int T = decltype(index)::value + 1;
    if (m.tokens == T) few_tokens<V, K, T>(shape, strips);
  });
}

}  // namespace
}  // namespace helm::cpu
