// IntegerTable::product of many tokens, over any vector type of integers. A span of a few strips
// becomes bytes once. These stay in L1 while tile after tile of tokens passes them, and the tokens'
// span stays in L2 while strips pass.
#pragma once

#include "cpu/kernels/quant/operands.h"
#include "cpu/kernels/quant/span.h"
#include "cpu/kernels/quant/sums.h"
#include "cpu/kernels/quant/unrolled.h"

namespace helm::cpu {
namespace {

inline constexpr int64_t kSpanBlocks = kSpanCols / kBlockCols;
inline constexpr int64_t kPassTokens = 264;  // pass a span at most, so that L2 holds what they take

// Tokens that pass a span, in whole tiles: behind the last one it comes again.
struct Pass {
  int64_t tokens;
  const QuantBlock* a[kPassTokens];  // their blocks of the span
  float* c[kPassTokens];
  int16_t first_far[kPassTokens + 1];           // of a token, in
  uint16_t far[kPassTokens * kSpanBlocks + 1];  // token * kSpanBlocks + block: has one far out

  void begin(const ProductShape& shape, int64_t first, int64_t count, int64_t tile) {
    const QuantArgs& m = shape.args;
    tokens = (count + tile - 1) / tile * tile;
    first_far[0] = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t token = first + (t < count ? t : count - 1);
      a[t] = shape.row_of_a(token);
      c[t] = m.c + token * m.c_stride;
    }
  }
  // The far blocks of tokens, behind those of the tokens before them.
  HELM_INLINE void find_far(int64_t token, int64_t count, int64_t blocks) {
    int end = first_far[token];
    for (int64_t t = token; t < token + count; ++t) {
      for (int64_t j = 0; j < blocks; ++j) {  // without a branch, which nothing could foresee
        __builtin_prefetch(a[t] + j + kSpanBlocks, 0, 2);
        far[end] = static_cast<uint16_t>(t * kSpanBlocks + j);
        end += a[t][j].far != 0;
      }
      first_far[t + 1] = static_cast<int16_t>(end);
    }
  }
  void next_span() {
    for (int64_t t = 0; t < tokens; ++t) a[t] += kSpanBlocks;
  }
};

// A span of some strips as bytes: what Operands::quad gives, line by line.
template <class V, Kind K>
struct Panel {
  Span<K> span;
  int strips;
  int64_t rows;    // of C
  bool from_zero;  // C is not read
  alignas(64) uint8_t bytes[Span<K>::kMostStrips][kSpanCols * kStripRows];

  void read(const ProductShape& shape, int64_t first_strip, int count, int64_t first_block) {
    span.read(shape, first_strip, 1, count, first_block);
    const QuantArgs& m = shape.args;
    strips = count;
    rows = min_of(count * kStripRows, m.rows - first_strip * kStripRows);
    from_zero = first_block == 0 && !m.accumulate && m.bias == nullptr;
    for (int s = 0; s < count; ++s) unpack(span.codes[s], bytes[s]);
  }
  // Asks for what read() takes, to L2.
  static void ask(const ProductShape& shape, int64_t first_strip, int64_t end,
                  int64_t first_block) {
    for (int64_t strip = first_strip; strip < end; ++strip) {
      const uint8_t* span = shape.span(strip, first_block);
      for (int64_t i = 0; i < shape.whole.bytes; i += kFormatLine) {
        __builtin_prefetch(span + i, 0, 2);
      }
    }
  }
  static constexpr int64_t line_at(int64_t block, int64_t quad) {
    return (block * kBlockCols / 4 + quad) * kFormatLine;
  }

 private:
  void unpack(const uint8_t* codes, uint8_t* out) const {
    constexpr int64_t kBlockBytes = row_of(K.codes).bits * kFormatLine;
    for (int64_t j = 0; j < span.blocks; ++j, codes += kBlockBytes) {
      each_index<kBlockCols / 4>([&](auto quad) HELM_LAMBDA_INLINE {
        constexpr int Q = decltype(quad)::value;
        HELM_UNROLL
        for (int64_t i = 0; i < kFormatLine; i += 4 * V::kRows) {
          V::store_ints(out + line_at(j, Q) + i, Operands<V, K.codes>::template quad<Q>(codes + i));
        }
      });
    }
  }
};

// What sums of a tile's products begin with: what integers have beyond a byte, mostly nothing.
template <class V, Kind K>
struct FarSums {
  alignas(64) int32_t
      of[kSpanBlocks * (K.halves ? 2 : 1)][V::kPromptTokens][V::kPromptTileStrips][kStripRows] = {};
};

// T tokens times S strips of a panel, with all sums in registers.
template <class V, Kind K, int T>
struct PromptTile : Vectors<V::kPromptTileStrips, kStripRows / V::kRows> {
  using Vectors<V::kPromptTileStrips, kStripRows / V::kRows>::each_vector;
  using F = typename V::F;
  using I = typename V::I;
  using C = Sums<V, K>;
  using Op = Operands<V, K.codes>;
  using Bytes = typename V::template Bytes<Op::kSigned>;
  static constexpr int S = V::kPromptTileStrips, P = kStripRows / V::kRows;
  static constexpr int kGroups = K.halves ? 2 : 1;
  static constexpr int kProducts = kBlockCols / 4 / kGroups;
  using Sum = typename V::template Sum<Op::kSigned, Op::kMost, kProducts>;

  const QuantBlock* a[T];
  const uint8_t* bytes[S];
  const float* scales[S];
  const float* minima[S];
  F c[T][S][P];

  // A block's sums of one group go into c.
  template <int kHalf>
  HELM_INLINE void add_group(int64_t block, int64_t group, const FarSums<V, K>& far) {
    Sum sum[T][S][P];
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        const auto* at = far.of[block * kGroups + kHalf][t][s] + p * V::kRows;
        sum[t][s][p].begin(V::load_ints(reinterpret_cast<const uint8_t*>(at)));
      });
    }
    each_index<kProducts>([&](auto index) HELM_LAMBDA_INLINE {
      constexpr int n = decltype(index)::value, Q = kHalf * kProducts + n;
      I w[S][P];
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        w[s][p] = V::load_ints(bytes[s] + Panel<V, K>::line_at(block, Q) + p * V::kRows * 4);
      });
      HELM_UNROLL
      for (int t = 0; t < T; ++t) {
        const I x = V::set4(a[t][block].q + 4 * Q);
        each_vector([&](int s, int p)
                        HELM_LAMBDA_INLINE { sum[t][s][p].template add<n>(Bytes(w[s][p]), x); });
      }
    });
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      const QuantBlock& x = a[t][block];
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        I total = sum[t][s][p].total;
        if constexpr (C::kOffset != 0) {
          total = V::add_ints(total, C::template offset_of<kHalf>(x));
        }
        const int64_t place = group * kStripRows + p * V::kRows;
        c[t][s][p] = C::template add<kHalf>(c[t][s][p], total, scales[s], minima[s], place, x);
      });
    }
  }

  // The far sums of these tokens' blocks; or zeros again.
  template <bool kSet>
  HELM_INLINE void set_far(const Pass& pass, int64_t token, FarSums<V, K>& far) const {
    for (int i = pass.first_far[token]; i < pass.first_far[token + T]; ++i) {
      const int64_t t = pass.far[i] / kSpanBlocks - token, block = pass.far[i] % kSpanBlocks;
      const QuantBlock& x = a[t][block];
      const unsigned col = static_cast<uint16_t>(x.far_col);
      auto& out = far.of[block * kGroups + (K.halves ? col / 16 : 0)][t];
      const I upper = V::set1_int((x.far & 0xff) << col % 4 * 8);
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        typename V::template Sum<Op::kSigned, Op::kMost, 1> sum;
        sum.begin(V::no_ints());
        if constexpr (kSet) {
          const uint8_t* line = bytes[s] + Panel<V, K>::line_at(block, col / 4);
          sum.template add<0>(Bytes(V::load_ints(line + p * V::kRows * 4)), upper);
        }
        V::store_ints(reinterpret_cast<uint8_t*>(out[s] + p * V::kRows),
                      V::template shift_left<kFarShift>(sum.total));
      });
    }
  }

  // The tokens from `token` on times the panel's strips from `strip` on.
  __attribute__((noinline)) static void run(const ProductShape& shape, const Panel<V, K>& panel,
                                            int strip, const Pass& pass, int64_t token,
                                            FarSums<V, K>& far) {
    const Span<K>& span = panel.span;
    const int64_t row = strip * kStripRows, rows = min_of(kRows, panel.rows - row);
    PromptTile tile;
    HELM_UNROLL
    for (int s = 0; s < S; ++s) {
      const int i = strip + s < panel.strips ? strip + s : panel.strips - 1;
      tile.bytes[s] = panel.bytes[i], tile.scales[s] = span.scales[i];
      tile.minima[s] = span.minima[K.minimum ? i : 0];
    }
    float* c[T];
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      tile.a[t] = pass.a[token + t];
      c[t] = pass.c[token + t] + span.strip * kStripRows + row;
    }
    float some[T][kRows];  // instead of C, which has fewer rows
    if (rows < kRows) [[unlikely]]
      copy(c, some, rows);
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        const float* from = c[t] + s * kStripRows + p * V::kRows;
        tile.c[t][s][p] = panel.from_zero ? V::zero() : V::load(from);
      });
    }
    tile.template set_far<true>(pass, token, far);
    for (int64_t j = 0; j < span.blocks; ++j) {
      if constexpr (K.halves) {
        tile.template add_group<0>(j, 2 * j, far);
        tile.template add_group<1>(j, 2 * j + 1, far);
      } else {
        tile.template add_group<0>(j, j >> shape.group_shift, far);
      }
    }
    tile.template set_far<false>(pass, token, far);
    HELM_UNROLL
    for (int t = 0; t < T; ++t) {
      each_vector([&](int s, int p) HELM_LAMBDA_INLINE {
        V::store(c[t] + s * kStripRows + p * V::kRows, tile.c[t][s][p]);
      });
    }
    if (rows < kRows) [[unlikely]]
      copy_back(pass.c + token, span.strip * kStripRows + row, some, rows);
  }

 private:
  static constexpr int64_t kRows = S * kStripRows;

  __attribute__((noinline)) static void copy(float* (&c)[T], float (&some)[T][kRows],
                                             int64_t rows) {
    for (int t = 0; t < T; ++t) {
      for (int64_t r = 0; r < kRows; ++r) some[t][r] = r < rows ? c[t][r] : 0.0f;
      c[t] = some[t];
    }
  }
  __attribute__((noinline)) static void copy_back(float* const* c, int64_t row,
                                                  const float (&some)[T][kRows], int64_t rows) {
    for (int t = 0; t < T; ++t) {
      for (int64_t r = 0; r < rows; ++r) c[t][row + r] = some[t][r];
    }
  }
};

// C of some tokens before the first span, where it has a bias.
inline void add_bias(const QuantArgs& m, int64_t row, int64_t end, int64_t token, int64_t tokens) {
  for (int64_t t = token; t < token + tokens; ++t) {
    float* c = m.c + t * m.c_stride;
    for (int64_t r = row; r < end; ++r) c[r] = m.accumulate ? c[r] + m.bias[r] : m.bias[r];
  }
}

// All tokens times the strips from `strip` to `end`.
template <class V, Kind K>
void prompt(const ProductShape& shape, int64_t strip, int64_t end) {
  constexpr int64_t T = V::kPromptTokens, kRest = (T + 1) / 2;
  constexpr int64_t kStrips = V::kPromptStrips, S = V::kPromptTileStrips;
  static_assert(kPassTokens % T == 0);
  const QuantArgs& m = shape.args;
  const int64_t passes = (m.tokens + kPassTokens - 1) / kPassTokens;
  const int64_t most = ((m.tokens + passes - 1) / passes + T - 1) / T * T;
  Panel<V, K> panel;
  Pass pass;
  FarSums<V, K> far;
  for (int64_t first = 0; first < m.tokens; first += most) {
    const int64_t tokens = min_of(most, m.tokens - first);
    if (m.bias) add_bias(m, strip * kStripRows, min_of(end * kStripRows, m.rows), first, tokens);
    pass.begin(shape, first, tokens, kRest);
    for (int64_t block = 0; block < shape.blocks; block += kSpanBlocks) {
      for (int64_t i = strip; i < end; i += kStrips) {
        panel.read(shape, i, static_cast<int>(min_of(kStrips, end - i)), block);
        const bool last = i + kStrips >= end;
        const int64_t next = last ? strip : i + kStrips;
        panel.ask(shape, next, min_of(next + kStrips, end), last ? block + kSpanBlocks : block);
        for (int64_t t = 0; t < pass.tokens; t += T) {
          if (i == strip) pass.find_far(t, min_of(T, pass.tokens - t), panel.span.blocks);
          for (int s = 0; s < panel.strips; s += S) {
            if (t + T <= pass.tokens) {
              PromptTile<V, K, T>::run(shape, panel, s, pass, t, far);
            } else {
              PromptTile<V, K, kRest>::run(shape, panel, s, pass, t, far);
            }
          }
        }
      }
      pass.next_span();
    }
  }
}

}  // namespace
}  // namespace helm::cpu
