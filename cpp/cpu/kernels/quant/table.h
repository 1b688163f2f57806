// Builds the table of one vector type of integers. A file of an instruction set instantiates it and
// exports the result.
#pragma once

#include "cpu/kernels/quant/product.h"
#include "cpu/kernels/quant/rows.h"

namespace helm::cpu {
namespace {

// Products by kind of format.
using ProductFunction = void (*)(const QuantArgs&, ReadScales);
struct ProductTable {
  ProductFunction of[kCodes][2][2];  // codes, halves, minimum

  constexpr ProductFunction& at(const Kind& kind) {
    return of[static_cast<int>(kind.codes)][kind.halves][kind.minimum];
  }
  constexpr ProductFunction at(const Kind& kind) const {
    return of[static_cast<int>(kind.codes)][kind.halves][kind.minimum];
  }
};

template <class V, int Row>
constexpr void put_product(ProductTable& table) {
  if constexpr (is_packed(kFormats[Row].format)) {
    constexpr Kind kKind = kind_of(kFormats[Row].format);
    table.at(kKind) = product_of<V, kKind>;
  }
}
template <class V, int... Rows>
constexpr ProductTable product_table(std::integer_sequence<int, Rows...>) {
  ProductTable table{};
  (put_product<V, Rows>(table), ...);
  return table;
}
inline constexpr int kFormatRows = sizeof(kFormats) / sizeof(kFormats[0]);

// So that the table needs no place for it.
constexpr bool offset_follows_from_the_rest() {
  for (const FormatRow& a : kFormats) {
    for (const FormatRow& b : kFormats) {
      const Kind x = kind_of(a.format), y = kind_of(b.format);
      if (x.codes == y.codes && x.halves == y.halves && x.minimum == y.minimum && x != y) {
        return false;
      }
    }
  }
  return true;
}
static_assert(offset_follows_from_the_rest());

template <class V>
void product(const QuantArgs& m) {
  static constexpr ProductTable kTable =
      product_table<V>(std::make_integer_sequence<int, kFormatRows>());
  if (m.tokens == 0 || m.rows == 0) return;
  kTable.at(kind_of(m.format))(m, kReadScales<V>[static_cast<int>(m.format.scales)][m.format.wide]);
}

// Sums of products of four-bit codes, which no table computes slower than others; as many of them
// as fit in sixteen registers.
template <class V>
double probe_dot(int64_t rounds, int32_t* sink) {
  constexpr int kChains = 8, kProducts = 8;
  using I = typename V::I;
  using Sum = typename V::template Sum<false, 15, kProducts>;
  const typename V::template Bytes<false> w(V::bits_and(V::set1_int(*sink), V::set1_byte(15)));
  I x = V::set1_byte(1);
  I totals[kChains];
  for (int i = 0; i < kChains; ++i) totals[i] = V::set1_int(i);
  for (int64_t n = 0; n < rounds; ++n) {
    Sum sums[kChains];
    each_index<kProducts>([&](auto which) HELM_LAMBDA_INLINE {
      HELM_UNROLL
      for (int i = 0; i < kChains; ++i) {
        V::barrier(x);  // or compilers multiply once
        sums[i].template add<decltype(which)::value>(w, x);
      }
    });
    HELM_UNROLL
    for (int i = 0; i < kChains; ++i) totals[i] = V::add_ints(totals[i], sums[i].total);
  }
  for (int i = 1; i < kChains; ++i) totals[0] = V::add_ints(totals[0], totals[i]);
  __builtin_memcpy(sink, &totals[0], sizeof *sink);
  return 2.0 * kChains * kProducts * 4 * V::kRows * static_cast<double>(rounds);
}

template <class V>
constexpr IntegerTable make_integer_table(const char* name) {
  IntegerTable t{};
  t.name = name;
  t.quantize_rows = quantize_rows<typename V::Floats>;
  t.product = product<V>;
  t.read_row = read_row;
  t.probe_dot = probe_dot<V>;
  return t;
}

}  // namespace
}  // namespace helm::cpu
