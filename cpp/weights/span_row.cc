#include "weights/span_row.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels/vec.h"
#include "helm/tiles.h"

namespace helm {
namespace {

constexpr int kRows = static_cast<int>(kStripRows);

// Four codes of each of four rows.
using Words = uint32_t __attribute__((vector_size(16)));

Words load_words(const uint8_t* code) {
  Words words;
  std::memcpy(&words, code, sizeof words);
  return words;
}

// To vector i: word i of each of four rows.
void transpose(const Words& a, const Words& b, const Words& c, const Words& d, Words* to) {
  const Words ab = {a[0], b[0], a[1], b[1]}, cd = {c[0], d[0], c[1], d[1]};
  const Words ab2 = {a[2], b[2], a[3], b[3]}, cd2 = {c[2], d[2], c[3], d[3]};
  to[0] = Words{ab[0], ab[1], cd[0], cd[1]};
  to[1] = Words{ab[2], ab[3], cd[2], cd[3]};
  to[2] = Words{ab2[0], ab2[1], cd2[0], cd2[1]};
  to[3] = Words{ab2[2], ab2[3], cd2[2], cd2[3]};
}

// Codes move four at a time, as the words of which a line has one per row.
template <Codes codes>
void write_block(const SpanRow* rows, int64_t k, std::byte* block) {
  for (int r = 0; r < kRows; r += 4) {
    Words w[8];  // columns 4 i to 4 i + 3
    for (int half = 0; half < 2; ++half) {
      const auto of_row = [&](int i) { return load_words(rows[r + i].code + k + 16 * half); };
      transpose(of_row(0), of_row(1), of_row(2), of_row(3), w + 4 * half);
    }
    const auto put = [&](int line, const Words& words) {
      std::memcpy(block + line * kFormatLine + r * 4, &words, sizeof words);
    };
    if constexpr (codes == Codes::kC8) {
      for (int i = 0; i < 8; ++i) put(i, w[i]);
      continue;
    }
    for (int i = 0; i < 4; ++i) put(i, (w[i] & 0x0f0f0f0f) | (w[4 + i] & 0x0f0f0f0f) << 4);
    if constexpr (codes == Codes::kC5) {
      Words plane = w[0] >> 4 & 0x01010101;
      for (int t = 1; t < 8; ++t) plane |= (w[t] >> 4 & 0x01010101) << t;
      put(4, plane);
    } else if constexpr (codes == Codes::kC6) {
      for (int p = 0; p < 2; ++p) {
        Words plane = w[4 * p] >> 4 & 0x03030303;
        for (int t = 1; t < 4; ++t) plane |= (w[4 * p + t] >> 4 & 0x03030303) << 2 * t;
        put(4 + p, plane);
      }
    }
  }
}

template <Codes codes>
void write_codes(const Format& format, int64_t n, const SpanRow* rows, std::byte* span) {
  for (int64_t k = 0; k < n; k += kBlockCols) {
    write_block<codes>(rows, k, span + block_at(format, n, k));
  }
}

// An array [groups][16 rows] of a header.
template <typename T>
void write_groups(const SpanRow* rows, const T (SpanRow::*member)[kMostGroups], int64_t groups,
                  std::byte* array) {
  T* to = reinterpret_cast<T*>(array);
  for (int64_t g = 0; g < groups; ++g) {
    for (int r = 0; r < kRows; ++r) to[g * kRows + r] = (rows[r].*member)[g];
  }
}

void write_header(const Format& format, int64_t n, const SpanRow* rows, std::byte* span) {
  const int64_t groups = format.group == 0 ? 0 : n / format.group;
  const auto at = [&](int which) { return span + group_array_at(format, n, which); };
  std::memset(span, 0, static_cast<size_t>(span_header_bytes(format, n)));
  switch (format.scales) {
    case Scales::kNone:
    case Scales::kR:
      return;
    case Scales::kS:
      return write_groups(rows, &SpanRow::s, groups, at(0));
    case Scales::kM:
      write_groups(rows, &SpanRow::s, groups, at(0));
      return write_groups(rows, &SpanRow::m, groups, at(1));
    case Scales::kZ:
      write_groups(rows, &SpanRow::s, groups, at(0));
      return write_groups(rows, &SpanRow::n, groups, at(1));
    case Scales::kE:
      return write_groups(rows, &SpanRow::l, groups, at(0));
    case Scales::kK:
    case Scales::kKM:
      break;
  }
  write_groups(rows, &SpanRow::l, groups, at(0));
  auto* d = reinterpret_cast<uint16_t*>(span + span_array_at(format, n, 0));
  for (int r = 0; r < kRows; ++r) d[r] = rows[r].d;
  if (format.scales == Scales::kK) return;
  write_groups(rows, &SpanRow::n, groups, at(1));
  for (int r = 0; r < kRows; ++r) d[kRows + r] = rows[r].e;
}

// 2^(e - 128), denormal for the least two exponents.
float power_of_two(uint8_t e) {
  return cpu::f32_from_bits(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// value = scale * v(u) + minimum; without minimum, nothing is added: -0 would become 0.
struct Affine {
  float scale;
  float minimum;
};

Affine affine(const Format& format, const SpanRow& row, int64_t g) {
  const auto wide = [&](uint16_t bits) {
    return format.wide ? cpu::f32_from_bf16(bits) : cpu::f32_from_f16(bits);
  };
  switch (format.scales) {
    case Scales::kNone:
      return {1, 0};
    case Scales::kS:
    case Scales::kZ:
      return {wide(row.s[g]), 0};
    case Scales::kM:
      return {wide(row.s[g]), wide(row.m[g])};
    case Scales::kE:
      return {power_of_two(row.l[g]), 0};
    case Scales::kK:
      return {cpu::f32_from_f16(row.d) * static_cast<float>(static_cast<int8_t>(row.l[g])), 0};
    case Scales::kKM:
      return {cpu::f32_from_f16(row.d) * static_cast<float>(row.l[g]),
              -(cpu::f32_from_f16(row.e) * static_cast<float>(row.n[g]))};
    case Scales::kR:
      return {row.row_scale, 0};
  }
  return {0, 0};
}

// Of scales e. 255 is the NaN of E8M0; 8 times 2^125 and 4 times 2^126 are infinite.
bool is_finite_group(const Format& format, const SpanRow& row, int64_t g) {
  const int e = row.l[g];
  if (e < 253) return true;
  const int end = e == 255 ? 0 : e == 254 ? 4 : 8;
  bool good = true;
  for (int64_t k = g * format.group; k < (g + 1) * format.group; ++k) {
    const int value = row_of(format.codes).values[row.code[k]];
    good &= -end < value && value < end;
  }
  return good;
}

}  // namespace

void write_span(const Format& format, int64_t n, const SpanRow* rows, std::byte* span) {
  write_header(format, n, rows, span);
  switch (row_of(format.codes).bits) {
    case 4:
      return write_codes<Codes::kC4>(format, n, rows, span);
    case 5:
      return write_codes<Codes::kC5>(format, n, rows, span);
    case 6:
      return write_codes<Codes::kC6>(format, n, rows, span);
    default:
      return write_codes<Codes::kC8>(format, n, rows, span);
  }
}

void write_strip_header(const Format& format, const SpanRow* rows, std::byte* strip) {
  if (strip_header_bytes(format) == 0) return;
  auto* to = reinterpret_cast<float*>(strip);
  for (int r = 0; r < kRows; ++r) to[r] = rows[r].row_scale;
}

void read_span(const Format& format, int64_t n, const std::byte* strip, const std::byte* span,
               int r, SpanRow* row) {
  for (int64_t k = 0; k < n; ++k) {
    const auto* block = reinterpret_cast<const uint8_t*>(span + block_at(format, n, k));
    row->code[k] =
        static_cast<uint8_t>(read_code(format.codes, block, r, static_cast<int>(k % kBlockCols)));
  }
  const int64_t groups = std::min<int64_t>(format.group == 0 ? 0 : n / format.group, kMostGroups);
  const auto groups_at = [&](int which, auto& to) {
    const std::byte* array = span + group_array_at(format, n, which);
    for (int64_t g = 0; g < groups; ++g) {
      std::memcpy(&to[g], array + (g * kRows + r) * int64_t{sizeof to[g]}, sizeof to[g]);
    }
  };
  const auto span_f16 = [&](int which) {
    uint16_t bits;
    std::memcpy(&bits, span + span_array_at(format, n, which) + 2 * r, sizeof bits);
    return bits;
  };
  const ScalesRow& scales = row_of(format.scales);
  if (scales.group_bytes[0] == 2) groups_at(0, row->s);
  if (scales.group_bytes[0] == 1) groups_at(0, row->l);
  if (scales.group_bytes[1] == 2) groups_at(1, row->m);
  if (scales.group_bytes[1] == 1) groups_at(1, row->n);
  if (scales.span_f16 > 0) row->d = span_f16(0);
  if (scales.span_f16 > 1) row->e = span_f16(1);
  if (scales.strip_f32 > 0) std::memcpy(&row->row_scale, strip + 4 * r, sizeof row->row_scale);
}

void span_values(const Format& format, int64_t n, const SpanRow& row, float* out) {
  const int8_t* values = row_of(format.codes).values;
  const bool minimum = row_of(format.scales).minimum && format.scales != Scales::kZ;
  const int64_t group = format.group == 0 ? n : format.group;
  for (int64_t g = 0; g < n / group; ++g) {
    const auto [scale, least] = affine(format, row, g);
    const int offset = format.scales == Scales::kZ ? row.n[g] : format.offset;
    const uint8_t* code = row.code + g * group;
    float* to = out + g * group;
    if (values != nullptr) {
      for (int64_t k = 0; k < group; ++k) to[k] = scale * static_cast<float>(values[code[k]]);
    } else if (minimum) {
      for (int64_t k = 0; k < group; ++k) to[k] = scale * static_cast<float>(code[k]) + least;
    } else {
      for (int64_t k = 0; k < group; ++k) to[k] = scale * static_cast<float>(code[k] - offset);
    }
  }
}

bool is_finite(const Format& format, int64_t n, const SpanRow& row) {
  const int64_t groups = format.group == 0 ? 0 : n / format.group;
  const auto exponent = static_cast<uint16_t>(format.wide ? 0x7f80 : 0x7c00);
  const auto finite = [](uint16_t bits, uint16_t all) { return (bits & all) != all; };
  bool good = true;
  switch (format.scales) {
    case Scales::kNone:
      break;
    case Scales::kM:
      for (int64_t g = 0; g < groups; ++g) good &= finite(row.m[g], exponent);
      [[fallthrough]];
    case Scales::kS:
    case Scales::kZ:
      for (int64_t g = 0; g < groups; ++g) good &= finite(row.s[g], exponent);
      break;
    case Scales::kE:
      for (int64_t g = 0; g < groups; ++g) good &= is_finite_group(format, row, g);
      break;
    case Scales::kKM:
      good &= finite(row.e, 0x7c00);
      [[fallthrough]];
    case Scales::kK:
      good &= finite(row.d, 0x7c00);
      break;
    case Scales::kR:
      good &= row.row_scale - row.row_scale == 0;
      break;
  }
  return good;
}

}  // namespace helm
