// IntegerTable::product over any vector type of integers: tiles of T tokens and S strips, each of
// which runs along the columns with all its sums in registers.
#pragma once

#include "cpu/kernels/quant/prompt.h"
#include "cpu/kernels/quant/sums.h"
#include "cpu/kernels/quant/unrolled.h"

namespace helm::cpu {
namespace {

// Tokens token, token + 1, ... times some strips of a span.
template <class V, Kind K, int T, int S>
struct Tile : Vectors<S, kStripRows / V::kRows> {
  using Vectors<S, kStripRows / V::kRows>::each_vector;
  using F = typename V::F;
  using I = typename V::I;
  using Op = Operands<V, K.codes>;
  using Bytes = typename V::template Bytes<Op::kSigned>;
  static constexpr int P = kStripRows / V::kRows;  // vectors side by side in a strip
  static constexpr bool kHalves = K.halves;        // else one sum per block
  static constexpr int kProducts = kHalves ? 4 : 8;
  using Sum = typename V::template Sum<Op::kSigned, Op::kMost, kProducts>;
  using C = Sums<V, K>;
  // One or two streams are asked for so far ahead, beyond the strip's end too; more run by
  // themselves. kSpanAhead: a span ahead, so that every line is asked for once.
  static constexpr bool kAsks = S <= 2;
  static constexpr int64_t kAhead = T == 1 ? V::kAheadOfOne : 1024;
  static constexpr bool kSpanAhead = kAsks && kAhead == 0;
  static constexpr int64_t kBlockBytes = row_of(K.codes).bits * kFormatLine;

  // What moves on is one offset for all tokens and one for all strips. Scales lie apart from the
  // sums, so that compilers keep these in registers.
  const std::byte* a[T];    // the rows of QuantBlock
  const uint8_t* codes[S];  // of the span
  int64_t a_at, codes_at;   // of the block
  int64_t span_bytes;
  const float* scales[S];
  const float* minima[S];
  F c[T][S][P];

  // The four columns of the n-th product of a block or, in groups of 16, of one of its halves. Both
  // halves of a line follow one another.
  template <int kHalf, int n>
  static constexpr int kQuad = kHalves                 ? kHalf * 4 + n
                               : K.codes == Codes::kC8 ? n
                                                       : n / 2 + n % 2 * 4;

  // The n-th product of the sums of a block or of one of its halves.
  template <int kHalf, int n>
  HELM_INLINE void multiply(Sum (&sum)[T][S][P]) const {
    constexpr int Q = kQuad<kHalf, n>;
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
    if constexpr (kAsks) {
      HELM_UNROLL
      for (int s = 0; s < S; ++s) {
        HELM_UNROLL
        for (int i = n * kLines / 8; i < (n + 1) * kLines / 8; ++i) {
          const uint8_t* at = line(s) + i * kFormatLine;
          if constexpr (kSpanAhead) {
            __builtin_prefetch(at + span_bytes, 0, 0);
          } else {
            __builtin_prefetch(at + kAhead);
          }
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
      if (!has_far<kHalf>(block(t))) continue;
      each_vector([&](int s, int p)
                      HELM_LAMBDA_INLINE { add_far_of(block(t), s, p, sum[t][s][p].total); });
    }
  }
  template <int kHalf>
  HELM_INLINE static bool has_far(const QuantBlock& b) {
    return b.far != 0 && (!kHalves || b.far_col / 16 == kHalf);
  }
  HELM_INLINE void add_far_of(const QuantBlock& b, int s, int p, I& total) const {
    const I x = V::set1_int((b.far & 0xff) << b.far_col % 4 * 8);
    typename V::template Sum<Op::kSigned, Op::kMost, 1> far;
    far.begin(V::no_ints());
    far.template add<0>(Bytes(Op::quad_at(line(s) + p * V::kRows * 4, b.far_col / 4)), x);
    total = V::add_ints(total, V::template shift_left<kFarShift>(far.total));
  }

  // A block's sums of one group go into c.
  template <int kHalf>
  HELM_INLINE void add_group(int64_t group) {
    if constexpr (T == 1 && Sum::kTwo) return add_group_by_vectors<kHalf>(group);
    Sum sum[T][S][P];
    each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
      HELM_UNROLL
      for (int t = 0; t < T; ++t) sum[t][s][p].begin(V::no_ints());
    });
    each_index<kProducts>([&](auto n)
                              HELM_LAMBDA_INLINE { multiply<kHalf, decltype(n)::value>(sum); });
    add_far<kHalf>(sum);
    each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
      HELM_UNROLL
      for (int t = 0; t < T; ++t) add_total<kHalf>(sum[t][s][p].total, t, s, p, group);
    });
  }
  // The same of one token, one vector of rows after the other: where a sum takes two registers,
  // those of all vectors do not fit.
  template <int kHalf>
  HELM_INLINE void add_group_by_vectors(int64_t group) {
    I x[kProducts];
    each_index<kProducts>([&](auto n) HELM_LAMBDA_INLINE {
      constexpr int kN = decltype(n)::value;
      fetch<kHalf * kProducts + kN>();
      x[kN] = V::set4(block(0).q + 4 * kQuad<kHalf, kN>);
    });
    const bool far = has_far<kHalf>(block(0));
    each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
      Sum sum;
      sum.begin(V::no_ints());
      each_index<kProducts>([&](auto n) HELM_LAMBDA_INLINE {
        constexpr int kN = decltype(n)::value;
        const Bytes w(Op::template quad<kQuad<kHalf, kN>>(line(s) + p * V::kRows * 4));
        sum.template add<kN>(w, x[kN]);
      });
      if (far) [[unlikely]]
        add_far_of(block(0), s, p, sum.total);
      add_total<kHalf>(sum.total, 0, s, p, group);
    });
  }
  template <int kHalf>
  HELM_INLINE void add_total(I total, int t, int s, int p, int64_t group) {
    const int64_t place = group * kStripRows + p * V::kRows;
    if constexpr (C::kOffset != 0)
      total = V::add_ints(total, C::template offset_of<kHalf>(block(t)));
    c[t][s][p] = C::template add<kHalf>(c[t][s][p], total, scales[s], minima[s], place, block(t));
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
    tile.a_at = tile.codes_at = 0, tile.span_bytes = span.bytes;
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      tile.a[t] = reinterpret_cast<const std::byte*>(shape.row_of_a(token + t) + span.block);
      HELM_UNROLL
      for (int s = 0; s < S; ++s) {
        begin(shape.args, span.block == 0, token + t, span.strip + (first_of_span + s) * span.step,
              tile.c[t][s]);
      }
    }
    tile.add_span(span.blocks, shape.group_shift);
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      HELM_UNROLL
      for (int s = 0; s < S; ++s) {
        end(shape.args, token + t, span.strip + (first_of_span + s) * span.step, tile.c[t][s]);
      }
    }
  }

  // C before a span, of the first [C] + [bias], zeros beyond the last row;
  HELM_INLINE static void begin(const QuantArgs& m, bool first_span, int64_t token, int64_t strip,
                                F (&v)[P]) {
    const int64_t first = strip * kStripRows;
    const float* c = m.c + token * m.c_stride + first;
    float some[kStripRows];
    if (first + kStripRows > m.rows) {
      begin_rows(m, first_span, token, first, some);
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
  HELM_INLINE static void end(const QuantArgs& m, int64_t token, int64_t strip, const F (&v)[P]) {
    const int64_t first = strip * kStripRows, n = min_of(kStripRows, m.rows - first);
    float* c = m.c + token * m.c_stride + first;
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
    if constexpr (Tile<V, K, T, S>::kSpanAhead) span.fetch_next_headers(S);
    Tile<V, K, T, S>::run(shape, span, 0, 0);
  }
}

// One tile of tokens: S strips at a time, as far apart as they can be.
template <class V, Kind K, int T>
void few_tokens(const ProductShape& shape, int64_t strips) {
  constexpr bool kOneOfBytes = T == 1 && K.codes == Codes::kC8;
  constexpr int S = kOneOfBytes ? V::kStripsOfBytes : V::kStripsPerTokens[T];
  const QuantArgs& m = shape.args;
  const int64_t step = strips / S, end = step * (m.slice + 1) / m.slices;
  for (int64_t i = step * m.slice / m.slices; i < end; ++i) {
    run_strips<V, K, T, S>(shape, i, step);
  }
  if (m.slice + 1 < m.slices) return;
  for (int64_t i = S * step; i < strips; ++i) run_strips<V, K, T, 1>(shape, i, 0);
}

// Two tiles of tokens times S adjacent strips: each span of these stays in L1 meanwhile.
template <class V, Kind K, int S>
void two_tiles(const ProductShape& shape, int64_t strip) {
  constexpr int64_t kFirst = V::kTileTokens;
  Span<K> span;
  for (int64_t block = 0; block < shape.blocks; block += kSpanBlocks) {
    span.read(shape, strip, 1, S, block);
    Tile<V, K, kFirst, S>::run(shape, span, 0, 0);
    each_index<kFirst>([&](auto rest) {
      constexpr int T = decltype(rest)::value + 1;
      if (shape.args.tokens - kFirst == T) Tile<V, K, T, S>::run(shape, span, 0, kFirst);
    });
  }
}

// Strips of a slice, `together` of which are computed together.
struct Strips {
  int64_t begin, end;
  Strips(const QuantArgs& m, int64_t strips, int64_t together) {
    const int64_t places = (strips + together - 1) / together;
    begin = min_of(strips, places * m.slice / m.slices * together);
    end = min_of(strips, places * (m.slice + 1) / m.slices * together);
  }
};

// IntegerTable::product of one kind of format.
template <class V, Kind K>
void product_of(const QuantArgs& m, ReadScales read_scales) {
  constexpr int kTile = V::kTileTokens, kTwo = V::kStripsPerTokens[kTile];
  const ProductShape shape(m, read_scales);
  const int64_t strips = (m.rows + kStripRows - 1) / kStripRows;
  if (m.tokens > 2 * kTile) {
    const Strips own(m, strips, V::kPromptStrips);
    return prompt<V, K>(shape, own.begin, own.end);
  }
  if (m.tokens > kTile) {
    const Strips own(m, strips, kTwo);
    int64_t i = own.begin;
    for (; i + kTwo <= own.end; i += kTwo) two_tiles<V, K, kTwo>(shape, i);
    for (; i < own.end; ++i) two_tiles<V, K, 1>(shape, i);
    return;
  }
  each_index<kTile>([&](auto index) {
    constexpr int T = decltype(index)::value + 1;
    if (m.tokens == T) few_tokens<V, K, T>(shape, strips);
  });
}

}  // namespace
}  // namespace helm::cpu
