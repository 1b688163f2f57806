// From codes to the bytes that products multiply, over any vector type of integers.
#pragma once

#include "cpu/kernels/quant/integer.h"
#include "cpu/kernels/vec.h"
#include "helm/tiles.h"

namespace helm::cpu {
namespace {

// Numbers of a table, made positive where products want them so.
struct ShiftedValues {
  alignas(16) int8_t values[16];
};
constexpr ShiftedValues shifted(const int8_t (&values)[16], int by) {
  ShiftedValues out{};
  for (int i = 0; i < 16; ++i) out.values[i] = static_cast<int8_t>(values[i] + by);
  return out;
}

// quad<Q>: the bytes of columns 4 Q to 4 Q + 3 of a block, of as many rows as V has. They are
// v(u) or u, plus kPlus; at most kMost where they are unsigned.
template <class V, Codes kCodes>
struct Operands {
  static constexpr bool kWide = kCodes == Codes::kC8 || kCodes == Codes::kNL4;
  static constexpr bool kSigned = V::kSigned && kWide;
  static constexpr int kPlus = kCodes == Codes::kMX4               ? 16
                               : kCodes == Codes::kC8 && kSigned   ? -128
                               : kCodes == Codes::kNL4 && !kSigned ? 128
                                                                   : 0;
  static constexpr int kMost = kCodes == Codes::kC5    ? 31
                               : kCodes == Codes::kC6  ? 63
                               : kCodes == Codes::kMX4 ? 28
                               : kWide                 ? 255
                                                       : 15;
  static constexpr ShiftedValues kTable =
      kCodes == Codes::kNL4 ? shifted(kNL4Values, kPlus) : shifted(kMX4Values, kPlus);
  using I = typename V::I;

  // The block's first line, from the first of these rows on.
  template <int Q>
  HELM_INLINE static I quad(const uint8_t* block) {
    if constexpr (kCodes == Codes::kC8) {
      const I codes = V::load_ints(block + Q * kFormatLine);
      if constexpr (kSigned) return V::bits_xor(codes, V::set1_byte(0x80));
      return codes;
    } else {
      const I line = V::load_ints(block + Q % 4 * kFormatLine);
      const I low = V::bits_and(V::template shift_words<(Q < 4 ? 0 : -4)>(line), V::set1_byte(15));
      if constexpr (kCodes == Codes::kC5) return V::bits_or(low, plane<4 - Q, 0x10>(block));
      if constexpr (kCodes == Codes::kC6) {
        return V::bits_or(low, plane<4 - Q % 4 * 2, 0x30>(block + Q / 4 * kFormatLine));
      }
      if constexpr (row_of(kCodes).values != nullptr) return V::look_up(kTable.values, low);
      return low;
    }
  }

  // The same of a Q that is not known before; slower.
  HELM_INLINE static I quad_at(const uint8_t* block, int q) {
    if constexpr (kCodes == Codes::kC8) {
      const I codes = V::load_ints(block + q * kFormatLine);
      if constexpr (kSigned) return V::bits_xor(codes, V::set1_byte(0x80));
      return codes;
    } else {
      const I line = V::load_ints(block + q % 4 * kFormatLine);
      const I low = V::bits_and(V::words_down(line, q / 4 * 4), V::set1_byte(15));
      if constexpr (kCodes == Codes::kC5) {
        const I bit = V::words_down(V::load_ints(block + 4 * kFormatLine), q);
        return V::bits_or(low, V::template shift_words<4>(V::bits_and(bit, V::set1_byte(1))));
      }
      if constexpr (kCodes == Codes::kC6) {
        const I bits = V::words_down(V::load_ints(block + (4 + q / 4) * kFormatLine), q % 4 * 2);
        return V::bits_or(low, V::template shift_words<4>(V::bits_and(bits, V::set1_byte(3))));
      }
      if constexpr (row_of(kCodes).values != nullptr) return V::look_up(kTable.values, low);
      return low;
    }
  }

 private:
  template <int Shift, int Mask>
  HELM_INLINE static I plane(const uint8_t* block) {
    const I line = V::load_ints(block + 4 * kFormatLine);
    return V::bits_and(V::template shift_words<Shift>(line), V::set1_byte(Mask));
  }
};

}  // namespace
}  // namespace helm::cpu
