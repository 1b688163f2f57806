// Matrix products of few tokens, straight from the weights: bound by reading them. The order of the
// sums is that of matmul.h.
#pragma once

#include "cpu/kernels/dot.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/weight_rows.h"

namespace helm::cpu {
namespace {

inline constexpr int kQuad = 4;  // sums reduced together
// So many tokens meet compressed rows one after the other, whose words then stay in registers; of
// more, each is loaded once for all rows.
inline constexpr int kTokensByRow = 2;
// One token and rows of more columns than these: its values and a tile's weights are more than L1
// holds, so that the values come from L2, for every tile anew. Tiles of more rows ask for them less
// often (AVX-512 on Zen 4: a tenth of a product's rate while memory is fast); where L1 holds both,
// more streams cost a tenth, and on Zen 3, whose memory is slower, a seventh to a fifth anyway.
inline constexpr int64_t kColsInL1 = 2048;
// What is read after a product is asked for in steps of few tokens, where they make two tiles: to
// do so in more instances of the kernels gained nothing (16 and 32 tokens).
inline constexpr int kReadAfterTile = kDecodeTokens / 2;

// C(t, r) = [C(t, r)] + [bias(r)] for the given rows: where the sum over k starts.
HELM_INLINE float start_value(const MatmulArgs& m, int64_t t, int64_t r) {
  const float c = m.accumulate ? m.c[t * m.c_stride + r] : 0.0f;
  return m.bias ? c + m.bias[r] : c;
}

// acc(r, t) += the sum over kChunk columns from k on of compressed rows, without escapes, times
// tokens. What comes later is fetched meanwhile.
template <class P, int R, int T, class Rows, class Input, Ask kAsk, class F>
HELM_INLINE void compressed_chunk(const Rows& rows, const Input* a, int64_t a_stride, int64_t k,
                                  const Prefetch<kAsk>& prefetch, F* acc) {
  using Words = typename Rows::Words;
  each<Rows::kVectors>([&](auto which) HELM_LAMBDA_INLINE {
    constexpr int I = decltype(which)::value;
    const auto load_a = [&](int t, int word, int part) HELM_LAMBDA_INLINE {
      return P::load_a(a + t * a_stride + k + I * Rows::kVector +
                       (word * P::kPerWords + part) * P::kStep);
    };
    if constexpr (T <= kTokensByRow) {
      HELM_UNROLL
      for (int r = 0; r < R; ++r) {
        Words words[2];
        rows.template fetch_vector<I>(r, k, prefetch);
        rows.template vector<I>(r, k, words);
        HELM_UNROLL
        for (int i = 0; i < 2; ++i) {
          each<P::kPerWords>([&](auto part) HELM_LAMBDA_INLINE {
            const auto x = P::template from_words<decltype(part)::value>(words[i]);
            HELM_UNROLL
            for (int t = 0; t < T; ++t) {
              acc[r * T + t] = P::fma(x, load_a(t, i, part.value), acc[r * T + t]);
            }
          });
        }
      }
    } else {
      Words words[R][2];
      HELM_UNROLL
      for (int r = 0; r < R; ++r) {
        rows.template fetch_vector<I>(r, k, prefetch);
        rows.template vector<I>(r, k, words[r]);
      }
      HELM_UNROLL
      for (int i = 0; i < 2; ++i) {
        each<P::kPerWords>([&](auto part) HELM_LAMBDA_INLINE {
          typename P::W x[R];
          HELM_UNROLL
          for (int r = 0; r < R; ++r) {
            x[r] = P::template from_words<decltype(part)::value>(words[r][i]);
          }
          HELM_UNROLL
          for (int t = 0; t < T; ++t) {
            typename P::A y = load_a(t, i, part.value);
            load_once<typename P::V>(y);
            HELM_UNROLL
            for (int r = 0; r < R; ++r) acc[r * T + t] = P::fma(x[r], y, acc[r * T + t]);
          }
        });
      }
    }
  });
}

// R rows, row_step apart, times T tokens. Where memory is what takes long, the R streams are far
// apart, so each is sequential and is prefetched on its own (adjacent rows measured a fifth to two
// fifths slower).
template <class P, int R, int T, class Rows, Ask kAsk>
void direct_tile(const MatmulArgs& m, const Rows& rows, int64_t row, int64_t row_step,
                 int64_t token, Prefetch<kAsk> prefetch) {
  using V = typename P::V;
  using Store = typename P::Store;
  using F = typename V::F;
  constexpr int kSums = (R * T + kQuad - 1) / kQuad * kQuad;
  const Store* w = rows.at;
  const int64_t w_step = rows.step;
  const int64_t a_step = m.a_stride;
  using Input = typename P::Input;
  const Input* a = reinterpret_cast<const Input*>(m.a) + token * m.a_stride;
  float c[kSums] = {};
  if (m.accumulate || m.bias) {
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) c[r * T + t] = start_value(m, token + t, row + r * row_step);
    }
  }
  for (int64_t k0 = 0; k0 < m.cols; k0 += P::kBlock) {
    const int64_t k1 = min_of(m.cols, k0 + P::kBlock);
    F acc[kSums];
    HELM_UNROLL
    for (int i = 0; i < kSums; ++i) acc[i] = V::zero();
    const auto step = [&](auto load_w, auto load_a, int64_t k) HELM_LAMBDA_INLINE {
      if constexpr (R <= T) {
        typename P::W x[R];
        HELM_UNROLL
        for (int r = 0; r < R; ++r) x[r] = load_w(w + r * w_step + k);
        HELM_UNROLL
        for (int t = 0; t < T; ++t) {
          const typename P::A y = load_a(a + t * a_step + k);
          HELM_UNROLL
          for (int r = 0; r < R; ++r) acc[r * T + t] = P::fma(x[r], y, acc[r * T + t]);
        }
      } else {
        typename P::A y[T];
        HELM_UNROLL
        for (int t = 0; t < T; ++t) y[t] = load_a(a + t * a_step + k);
        HELM_UNROLL
        for (int r = 0; r < R; ++r) {
          const typename P::W x = load_w(w + r * w_step + k);
          HELM_UNROLL
          for (int t = 0; t < T; ++t) acc[r * T + t] = P::fma(x, y[t], acc[r * T + t]);
        }
      }
      keep_order<V>();
    };
    const auto load_w = [](const Store* p) HELM_LAMBDA_INLINE { return P::load_w(p); };
    const auto load_a = [](const Input* p) HELM_LAMBDA_INLINE { return P::load_a(p); };
    constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(Store));  // elements
    constexpr int kSteps = kLine / P::kStep > 0 ? kLine / P::kStep : 1;
    for (int64_t k = k0; k < k1;) {
      int64_t end = k1;
      if constexpr (Rows::kCompressed) {
        const int64_t plain = rows.next_plain(k, k1);
        for (; k < plain; k += kChunk) {
          compressed_chunk<P, R, T>(rows, a, a_step, k, prefetch, acc);
          Rows::next_chunk(prefetch);
        }
        if (k == k1) break;
        end = min_of(k1, k + kChunk);
        rows.fetch_chunk(k, prefetch);
        rows.make_plain(k, end);
        Rows::next_chunk(prefetch);
      }
      for (; k + kSteps * P::kStep <= end; k += kSteps * P::kStep) {
        rows.template fetch<R>(k, prefetch);
        HELM_UNROLL
        for (int s = 0; s < kSteps; ++s) step(load_w, load_a, k + s * P::kStep);
      }
      for (; k + P::kStep <= end; k += P::kStep) step(load_w, load_a, k);
      if (k < end) {
        const int64_t n = end - k;
        step([n](const Store* p) HELM_LAMBDA_INLINE { return P::load_w_n(p, n); },
             [n](const Input* p) HELM_LAMBDA_INLINE { return P::load_a_n(p, n); }, k);
        k = end;
      }
    }
    float sums[kSums];
    V::template reduce<kSums>(acc, sums);
    for (int i = 0; i < kSums; ++i) c[i] += sums[i];
  }
  HELM_UNROLL
  for (int t = 0; t < T; ++t) {
    float* out = m.c + (token + t) * m.c_stride + row;
    HELM_UNROLL
    for (int r = 0; r < R; ++r) out[r * row_step] = c[r * T + t];
  }
}

// The columns [k0, k0 + cols) of a product, which go on with what those before them made of C.
template <class P>
MatmulArgs columns_of(const MatmulArgs& m, int64_t k0, int64_t cols) {
  using Input = typename P::Input;
  MatmulArgs part = m;
  part.a = reinterpret_cast<const float*>(reinterpret_cast<const Input*>(m.a) + k0);
  part.cols = cols;
  if (k0 > 0) part.accumulate = true, part.bias = nullptr;
  return part;
}

// Takes so many bytes of what is read after a product, with what follows where up to half of them
// are not of it; null where there are none.
HELM_INLINE const std::byte* take(ReadAfter* after, int64_t bytes) {
  if (after == nullptr) return nullptr;
  for (; after->first != after->end; ++after->first) {
    ReadAfter::Stretch& left = *after->first;
    if (2 * left.bytes < bytes) continue;
    left.at += bytes, left.bytes -= bytes;
    return left.at - bytes;
  }
  return nullptr;
}

// All tokens in tiles of kRows rows and C or C - 1 tokens, one group of rows after the other: a
// group's weights come from memory for the first tile and from cache for the others. Of several
// tiles each asks for its share of what comes next, so that memory is busy during all of them.
// Once: there is one tile.
template <class P, int C, int kRows, bool Once, class Weights>
void direct_rows(const MatmulArgs& m, const Weights& w, int64_t tiles) {
  static_assert(Weights::kCols == INT64_MAX || Weights::kCols % P::kBlock == 0);
  const int64_t full = m.tokens - tiles * (C - 1);  // tiles of C tokens, they come first
  constexpr bool kAdjoin = !Once && P::V::kRowsAdjoin;
  constexpr int64_t kNext = kAdjoin ? kRows : 1;  // rows to the next group
  const int64_t groups = m.rows / kRows;
  const int64_t step = kAdjoin ? 1 : groups;  // between the rows of a group
  const auto columns = [&](auto count, const MatmulArgs& part, int64_t row,
                           int64_t k0) HELM_LAMBDA_INLINE {
    constexpr int R = decltype(count)::value;
    if constexpr (Once) {
      const auto rows = w.template rows_once<R>(row, step, k0);
      direct_tile<P, R, C>(part, rows, row, step, 0, w.template prefetch_once<C>());
    } else {
      const auto rows = w.rows(row, step, R, k0, part.cols);
      for (int64_t i = 0, t = 0; i < tiles; ++i) {
        const auto prefetch = w.prefetch(part.cols, kNext, i, tiles);
        if constexpr (Weights::kReadsAfter && C == kReadAfterTile) {
          const int64_t bytes = part.cols * static_cast<int64_t>(sizeof(typename P::Store));
          const std::byte* after = i < full ? take(m.after, bytes) : nullptr;
          if (after != nullptr) {
            direct_tile<P, R, C>(
                part, rows, row, step, t,
                Prefetch<Ask::kInOrderAndAfter>{prefetch.far, prefetch.step, after});
            t += C;
            continue;
          }
        }
        if (i < full) {
          direct_tile<P, R, C>(part, rows, row, step, t, prefetch);
          t += C;
        } else if constexpr (C > 1) {
          direct_tile<P, R, C - 1>(part, rows, row, step, t, prefetch);
          t += C - 1;
        }
      }
    }
  };
  const auto group = [&](auto count, int64_t row) HELM_LAMBDA_INLINE {
    if (m.cols <= Weights::kCols) return columns(count, m, row, 0);
    for (int64_t k0 = 0; k0 < m.cols; k0 += Weights::kCols) {
      columns(count, columns_of<P>(m, k0, min_of(Weights::kCols, m.cols - k0)), row, k0);
    }
  };
  const int64_t end = groups * (m.slice + 1) / m.slices;
  for (int64_t i = groups * m.slice / m.slices; i < end; ++i) group(Count<kRows>{}, i * kNext);
  if (m.slice + 1 < m.slices) return;
  for (int64_t r = groups * kRows; r < m.rows; ++r) group(Count<1>{}, r);
}

// Tokens are cut into tiles as even as possible. Compressed rows that several tiles read are tiled
// as stored ones are.
template <class P, class Weights>
void direct_product(const MatmulArgs& m, const Weights& w) {
  using V = typename P::V;
  constexpr int kMax = Weights::kTileTokens;
  static_assert(kMax >= V::kDirectTile && kMax <= 8);
  const int64_t most = m.tokens <= kMax ? kMax : V::kDirectTile;
  const int64_t tiles = (m.tokens + most - 1) / most;
  const auto rows = [&](auto count) HELM_LAMBDA_INLINE {
    constexpr int C = decltype(count)::value;
    constexpr int kRows = Weights::kRowsPerTokens[C], kLong = Weights::kLongRowsPerTile;
    if constexpr (C == 1 && kLong != kRows) {
      if (m.cols > kColsInL1) return direct_rows<P, 1, kLong, true>(m, w, 1);
    }
    if (tiles == 1) return direct_rows<P, C, kRows, true>(m, w, 1);
    if constexpr (C > 1 && C <= V::kDirectTile) {
      direct_rows<P, C, V::kRowsPerTokens[C], false>(m, w, tiles);
    }
  };
  switch ((m.tokens + tiles - 1) / tiles) {
    case 1:
      return rows(Count<1>{});
    case 2:
      return rows(Count<2>{});
    case 3:
      if constexpr (kMax >= 3) return rows(Count<3>{});
      break;
    case 4:
      if constexpr (kMax >= 4) return rows(Count<4>{});
      break;
    case 5:
      if constexpr (kMax >= 5) return rows(Count<5>{});
      break;
    case 6:
      if constexpr (kMax >= 6) return rows(Count<6>{});
      break;
    case 7:
      if constexpr (kMax >= 7) return rows(Count<7>{});
      break;
    case 8:
      if constexpr (kMax >= 8) return rows(Count<8>{});
      break;
  }
}

}  // namespace
}  // namespace helm::cpu
