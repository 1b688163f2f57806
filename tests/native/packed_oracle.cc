#include "packed_oracle.h"

#include <cmath>
#include <cstring>
#include <random>

namespace helm::test {
namespace {

constexpr int64_t kRows = 16, kLine = 64;

// Takes arrays one after the other, each padded to whole lines.
class Walk {
 public:
  explicit Walk(unsigned char* at) : at_(at) {}
  unsigned char* take(int64_t bytes) {
    unsigned char* array = at_;
    at_ += (bytes + kLine - 1) / kLine * kLine;
    return array;
  }

 private:
  unsigned char* at_;
};

float half(const Format& f, const unsigned char* p) {
  const auto bits = static_cast<uint16_t>(p[0] | p[1] << 8);
  return static_cast<float>(f.wide ? decode_bf16(bits) : decode_f16(bits));
}

class Maker {
 public:
  explicit Maker(uint32_t seed) : random_(seed) {}

  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  void put_half(const Format& f, unsigned char* p, double size, bool negative) {
    double v = size * std::uniform_real_distribution<double>(0.25, 1.0)(random_);
    if (negative && integer(0, 1) == 1) v = -v;
    const auto x = static_cast<float>(v);
    const uint16_t bits = f.wide ? encode_bf16(x) : encode_f16(x);
    p[0] = static_cast<unsigned char>(bits), p[1] = static_cast<unsigned char>(bits >> 8);
  }

 private:
  std::mt19937 random_;
};

// Column k of row r in the lines of 32 columns.
int code_at(Codes codes, const unsigned char* block, int64_t r, int64_t k) {
  const auto byte = [&](int64_t line) { return block[line * kLine + 4 * r + k % 4]; };
  if (codes == Codes::kC8) return byte(k / 4);
  int code = byte(k / 4 % 4);
  code = k < 16 ? code & 15 : code >> 4;
  if (codes == Codes::kC5) code |= (byte(4) >> (k / 4) & 1) << 4;
  if (codes == Codes::kC6) code |= (byte(4 + k / 16) >> (k / 4 % 4 * 2) & 3) << 4;
  return code;
}

int number_of(const Format& f, int code, int zero) {
  if (f.codes == Codes::kNL4) return kNL4Values[code];
  if (f.codes == Codes::kMX4) return kMX4Values[code];
  return f.scales == Scales::kZ ? code : code - zero;
}

struct SpanArrays {
  unsigned char *first = nullptr, *second = nullptr, *of_span = nullptr;
};

SpanArrays take_header(const Format& f, Walk& walk, int64_t groups) {
  SpanArrays a;
  switch (f.scales) {
    case Scales::kS:
      a.first = walk.take(groups * kRows * 2);
      break;
    case Scales::kM:
      a.first = walk.take(groups * kRows * 2), a.second = walk.take(groups * kRows * 2);
      break;
    case Scales::kZ:
      a.first = walk.take(groups * kRows * 2), a.second = walk.take(groups * kRows);
      break;
    case Scales::kE:
      a.first = walk.take(groups * kRows);
      break;
    case Scales::kK:
      a.first = walk.take(groups * kRows), a.of_span = walk.take(kRows * 2);
      break;
    case Scales::kKM:
      a.first = walk.take(groups * kRows), a.second = walk.take(groups * kRows);
      a.of_span = walk.take(2 * kRows * 2);
      break;
    default:
      break;
  }
  return a;
}

// Writes what scales a real matrix may have; the codes are random bytes already.
void fill_header(const Format& f, const SpanArrays& a, int64_t groups, Maker& make) {
  const int codes = 1 << row_of(f.codes).bits;
  const double size = 2.0 / (f.codes == Codes::kNL4 ? 256 : codes);
  const bool last_rows = make.integer(0, 3) == 0;  // some rows without scales
  for (int64_t i = 0; i < groups * kRows; ++i) {
    const bool none = last_rows && i % kRows > 12;
    if (f.scales == Scales::kS || f.scales == Scales::kM || f.scales == Scales::kZ) {
      make.put_half(f, a.first + 2 * i, none ? 0 : size, true);
    }
    if (f.scales == Scales::kM) make.put_half(f, a.second + 2 * i, 1.0, true);
    if (f.scales == Scales::kZ) {
      a.second[i] = static_cast<unsigned char>(make.integer(0, codes));  // 16: as GPTQ may have
    }
    if (f.scales == Scales::kE) a.first[i] = static_cast<unsigned char>(make.integer(117, 130));
    if (f.scales == Scales::kK || f.scales == Scales::kKM) {
      a.first[i] = static_cast<unsigned char>(make.integer(0, 255));
    }
    if (f.scales == Scales::kKM) a.second[i] = static_cast<unsigned char>(make.integer(0, 255));
  }
  if (f.scales == Scales::kE && make.integer(0, 4) == 0) a.first[3] = 0, a.first[4] = 1;
  for (int64_t i = 0; a.of_span != nullptr && i < (f.scales == Scales::kKM ? 2 : 1) * kRows; ++i) {
    make.put_half(f, a.of_span + 2 * i, i < kRows ? size / 128 : 1.0 / 128, true);
  }
}

PackedWeight weight_of(const Format& f, const SpanArrays& a, const unsigned char* strip,
                       int64_t group, int64_t r, int code) {
  const int64_t i = group * kRows + r;
  PackedWeight w{0, 0, number_of(f, code, f.offset)};
  switch (f.scales) {
    case Scales::kS:
      w.s = half(f, a.first + 2 * i);
      break;
    case Scales::kM:
      w.s = half(f, a.first + 2 * i), w.m = half(f, a.second + 2 * i);
      break;
    case Scales::kZ:
      w.s = half(f, a.first + 2 * i), w.m = -(w.s * static_cast<float>(a.second[i]));
      break;
    case Scales::kE:
      w.s = std::ldexp(1.0f, a.first[i] - 128);
      break;
    case Scales::kK:
      w.s = half(f, a.of_span + 2 * r) * static_cast<float>(static_cast<int8_t>(a.first[i]));
      break;
    case Scales::kKM:
      w.s = half(f, a.of_span + 2 * r) * static_cast<float>(a.first[i]);
      w.m = -(half(f, a.of_span + 2 * (kRows + r)) * static_cast<float>(a.second[i]));
      break;
    default:
      std::memcpy(&w.s, strip + 4 * r, 4);
  }
  return w;
}

}  // namespace

std::vector<Format> packed_formats() {
  std::vector<Format> formats;
  for (const FormatRow& row : kFormats) {
    if (is_packed(row.format)) formats.push_back(row.format);
  }
  return formats;
}

Packed random_packed(const Format& format, int64_t rows, int64_t cols, uint32_t seed) {
  Maker make(seed);
  const int64_t unit = format.group > 32 ? format.group : 32;
  const int64_t padded = (cols + unit - 1) / unit * unit, strips = (rows + kRows - 1) / kRows;
  Packed p{format, rows, cols, {}, {}, padded};
  p.bytes.resize(static_cast<size_t>(format_bytes(format, rows, cols)));
  p.weights.resize(static_cast<size_t>(strips * kRows * padded));
  for (unsigned char& byte : p.bytes) byte = static_cast<unsigned char>(make.integer(0, 255));
  Walk walk(p.bytes.data());
  for (int64_t strip = 0; strip < strips; ++strip) {
    unsigned char* begin = walk.take(format.scales == Scales::kR ? kRows * 4 : 0);
    for (int64_t r = 0; format.scales == Scales::kR && r < kRows; ++r) {
      const float s = static_cast<float>(make.integer(1, 1000)) * 1e-5f;
      std::memcpy(begin + 4 * r, &s, 4);
    }
    for (int64_t k0 = 0; k0 < padded; k0 += 256) {
      const int64_t n = padded - k0 < 256 ? padded - k0 : 256;
      const int64_t groups = format.group == 0 ? 1 : n / format.group;
      const SpanArrays arrays = take_header(format, walk, groups);
      fill_header(format, arrays, groups, make);
      const unsigned char* codes = walk.take(kRows * n * row_of(format.codes).bits / 8);
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t k = 0; k < n; ++k) {
          const unsigned char* block = codes + k / 32 * row_of(format.codes).bits * kLine;
          const int code = code_at(format.codes, block, r, k % 32);
          p.weights[static_cast<size_t>((strip * kRows + r) * padded + k0 + k)] = weight_of(
              format, arrays, begin, k / (format.group == 0 ? 256 : format.group), r, code);
        }
      }
    }
  }
  return p;
}

int integer_at(const cpu::QuantBlock& block, int64_t k) {
  return block.q[k] + (k == block.far_col ? 128 * block.far : 0);
}

float chain(const Packed& w, int64_t r, const cpu::QuantBlock* a, bool accumulate, float before,
            const float* bias) {
  float c = accumulate ? before : 0.0f;
  if (bias != nullptr) c = accumulate ? c + *bias : *bias;
  const int64_t group = w.format.group == 16 ? 16 : 32;
  const bool minimum = w.format.scales == Scales::kM || w.format.scales == Scales::kZ ||
                       w.format.scales == Scales::kKM;
  for (int64_t k = 0; k < (w.cols + 31) / 32 * 32; k += group) {
    const cpu::QuantBlock& block = a[k / 32];
    int32_t sum = 0, of_a = 0;
    for (int64_t i = k; i < k + group; ++i) {
      sum += w.at(r, i).number * integer_at(block, i % 32);
      of_a += integer_at(block, i % 32);
    }
    const PackedWeight& first = w.at(r, k);
    c = std::fma(static_cast<float>(sum), first.s * block.alpha, c);
    if (minimum) c = std::fma(first.m, block.alpha * static_cast<float>(of_a), c);
  }
  return c;
}

ExactSum exact_sum(const Packed& w, int64_t r, const cpu::QuantBlock* a, double start) {
  double value = start, size = std::abs(start);
  for (int64_t k = 0; k < w.cols; ++k) {
    const PackedWeight& weight = w.at(r, k);
    const double x = static_cast<double>(a[k / 32].alpha) * integer_at(a[k / 32], k % 32);
    value += (static_cast<double>(weight.s) * weight.number + weight.m) * x;
    size += (std::abs(static_cast<double>(weight.s) * weight.number) + std::abs(weight.m)) *
            std::abs(x);
  }
  // Of every group two products and two sums are rounded, each to half of an epsilon.
  const double steps = 2.0 * static_cast<double>((w.cols + 15) / 16) + 2;
  return {value, (steps + 2) * kEps / 2 * size + 1e-36};
}

}  // namespace helm::test
