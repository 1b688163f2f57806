#include "weights/ggml.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "cpu/kernels/vec.h"
#include "weights/ggml_blocks.h"

namespace helm {
namespace {

using ggml::kBlock;

template <typename T>
T load(const void* from) {  // files align nothing
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename Block>
const Block& stored_block(const std::byte* from, int64_t i) {
  return reinterpret_cast<const Block*>(from)[i];
}

// Sixteen bytes as two words; what a shift moves from one byte into the next is masked.
using Bytes = uint64_t __attribute__((vector_size(16)));

constexpr uint64_t each(uint64_t byte) {
  return byte * 0x0101010101010101;
}
void store(uint8_t* to, Bytes bytes) {
  std::memcpy(to, &bytes, sizeof bytes);
}

// A multiple of 16 bytes.
void split_nibbles(const uint8_t* from, uint8_t* low, uint8_t* high, int bytes) {
  for (int j = 0; j < bytes; j += 16) {
    const auto both = load<Bytes>(from + j);
    store(low + j, both & each(15));
    store(high + j, both >> 4 & each(15));
  }
}

// Two bits of each of 32 codes a byte, from bit `shift` on; four runs of 32 codes have the same
// bytes.
Bytes pairs(const uint8_t* from, int shift) {
  return load<Bytes>(from) >> shift & each(3);
}
void split_pairs(const uint8_t* from, uint8_t* code) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 32; j += 16) {
      store(code + 32 * i + j, pairs(from + i / 4 * 32 + j, i % 4 * 2));
    }
  }
}

// Bit i of byte j becomes bit `to` of code 32 i + j.
void add_bits(const uint8_t* from, int to, uint8_t* code) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 32; j += 16) {
      uint8_t* at = code + 32 * i + j;
      store(at, load<Bytes>(at) | (load<Bytes>(from + j) >> i & each(1)) << to);
    }
  }
}

// Bit j of `bits` is bit 4 of code j.
void add_fifth_bits(const uint8_t* bits, uint8_t* code) {
  for (int i = 0; i < kBlock / 8; ++i) {
    const uint64_t chosen = bits[i] * each(1) & 0x8040201008040201;  // one bit of each byte
    const uint64_t top = (chosen + each(0x7f)) & each(0x80);         // of each byte that is not 0
    const uint64_t codes = load<uint64_t>(code + 8 * i) | top >> 3;
    std::memcpy(code + 8 * i, &codes, sizeof codes);
  }
}

// Of n columns, with a block per 32: 4 or 5 bits, and a scale with or without a minimum.
template <typename Block>
void unpack_blocks(const std::byte* from, int64_t n, SpanRow& row) {
  for (int64_t i = 0; i < n / kBlock; ++i) {
    const auto& block = stored_block<Block>(from, i);
    uint8_t* code = row.code + i * kBlock;
    split_nibbles(block.qs, code, code + kBlock / 2, kBlock / 2);
    if constexpr (requires { block.qh; }) add_fifth_bits(block.qh, code);
    if constexpr (requires { block.d; }) row.s[i] = block.d;
    if constexpr (requires { block.m; }) row.m[i] = block.m;
    if constexpr (requires { block.e; }) row.l[i] = block.e;
  }
}

template <>
void unpack_blocks<ggml::Q8_0>(const std::byte* from, int64_t n, SpanRow& row) {
  for (int64_t i = 0; i < n / kBlock; ++i) {
    const auto& block = stored_block<ggml::Q8_0>(from, i);
    row.s[i] = block.d;
    for (int j = 0; j < kBlock; j += 16) {
      store(row.code + i * kBlock + j, load<Bytes>(block.qs + j) ^ each(0x80));
    }
  }
}

// Scales and minima of six bits, eight each in three words of four bytes.
void split_scales(const uint8_t* scales, SpanRow& row) {
  const auto a = load<uint32_t>(scales), b = load<uint32_t>(scales + 4);
  const auto c = load<uint32_t>(scales + 8);
  constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTop = 0x30303030;
  const uint32_t l[2] = {a & kSix, (c & kFour) | (a >> 2 & kTop)};
  const uint32_t n[2] = {b & kSix, (c >> 4 & kFour) | (b >> 2 & kTop)};
  std::memcpy(row.l, l, sizeof l);
  std::memcpy(row.n, n, sizeof n);
}

void unpack_q2_k(const std::byte* from, int64_t, SpanRow& row) {
  const auto& block = stored_block<ggml::Q2_K>(from, 0);
  split_pairs(block.qs, row.code);
  split_nibbles(block.scales, row.l, row.n, 16);
  row.d = block.d;
  row.e = block.dmin;
}

void unpack_q3_k(const std::byte* from, int64_t, SpanRow& row) {
  const auto& block = stored_block<ggml::Q3_K>(from, 0);
  split_pairs(block.qs, row.code);
  add_bits(block.hmask, 2, row.code);
  // Scale i: four bits in byte i % 8, two in byte 8 + i % 4.
  for (int i = 0; i < 16; ++i) {
    const int low = block.scales[i % 8] >> i / 8 * 4 & 15;
    const int high = block.scales[8 + i % 4] >> i / 4 * 2 & 3;
    row.l[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  row.d = block.d;
}

// Four bits of the K types: of each 64 columns the first half is low.
void split_halves(const uint8_t* from, uint8_t* code) {
  for (int i = 0; i < 4; ++i) {
    split_nibbles(from + 32 * i, code + 64 * i, code + 64 * i + 32, 32);
  }
}

void unpack_q4_k(const std::byte* from, int64_t, SpanRow& row) {
  const auto& block = stored_block<ggml::Q4_K>(from, 0);
  split_halves(block.qs, row.code);
  split_scales(block.scales, row);
  row.d = block.d;
  row.e = block.dmin;
}

void unpack_q5_k(const std::byte* from, int64_t, SpanRow& row) {
  const auto& block = stored_block<ggml::Q5_K>(from, 0);
  split_halves(block.qs, row.code);
  add_bits(block.qh, 4, row.code);
  split_scales(block.scales, row);
  row.d = block.d;
  row.e = block.dmin;
}

void unpack_q6_k(const std::byte* from, int64_t, SpanRow& row) {
  const auto& block = stored_block<ggml::Q6_K>(from, 0);
  for (int i = 0; i < 2; ++i) {
    split_nibbles(block.ql + 64 * i, row.code + 128 * i, row.code + 128 * i + 64, 64);
  }
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 32; j += 16) {
      uint8_t* at = row.code + 32 * i + j;
      store(at, load<Bytes>(at) | pairs(block.qh + i / 4 * 32 + j, i % 4 * 2) << 4);
    }
  }
  std::memcpy(row.l, block.scales, sizeof block.scales);
  row.d = block.d;
}

void unpack_iq4_xs(const std::byte* from, int64_t, SpanRow& row) {
  const auto& block = stored_block<ggml::IQ4_XS>(from, 0);
  for (int i = 0; i < 8; ++i) {
    uint8_t* code = row.code + 32 * i;
    split_nibbles(block.qs + 16 * i, code, code + 16, 16);
    const int low = block.scales_l[i / 2] >> i % 2 * 4 & 15;
    const int high = block.scales_h >> 2 * i & 3;
    row.l[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  row.d = block.d;
}

int64_t total_rows(const std::vector<RowRun>& runs) {
  int64_t rows = 0;
  for (const RowRun& run : runs) rows += run.rows;
  return rows;
}

// By Stored; null of dense ones.
constexpr GgmlMatrix::Unpack kUnpack[] = {
    nullptr,
    nullptr,
    nullptr,
    unpack_blocks<ggml::Q4_0>,
    unpack_blocks<ggml::Q4_1>,
    unpack_blocks<ggml::Q5_0>,
    unpack_blocks<ggml::Q5_1>,
    unpack_blocks<ggml::Q8_0>,
    unpack_q2_k,
    unpack_q3_k,
    unpack_q4_k,
    unpack_q5_k,
    unpack_q6_k,
    unpack_blocks<ggml::IQ4_NL>,
    unpack_iq4_xs,
    unpack_blocks<ggml::Mxfp4>,
};
static_assert(std::size(kUnpack) == static_cast<size_t>(Stored::kMXFP4) + 1);

// A dense row to f32.
void widen_row(DType dtype, const std::byte* row, int64_t cols, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, row, static_cast<size_t>(cols) * sizeof(float));
    return;
  }
  for (int64_t k = 0; k < cols; ++k) {
    const auto bits = load<uint16_t>(row + 2 * k);
    out[k] = dtype == DType::kF16 ? cpu::f32_from_f16(bits) : cpu::f32_from_bf16(bits);
  }
}

}  // namespace

GgmlMatrix::GgmlMatrix(std::string name, Stored stored, std::vector<RowRun> runs, int64_t cols,
                       int64_t first_row)
    : StoredMatrix(std::move(name), total_rows(runs), cols, row_of(stored).exact, first_row),
      stored_(stored),
      unpack_(kUnpack[static_cast<int>(stored)]),
      runs_(std::move(runs)) {
  int64_t row = 0;
  for (const RowRun& run : runs_) begins_.push_back(std::exchange(row, row + run.rows));
}

const std::byte* GgmlMatrix::row_at(int64_t row) const {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), row);
  const auto run = static_cast<size_t>(after - begins_.begin()) - 1;
  return runs_[run].first + (row - begins_[run]) * runs_[run].stride;
}

void GgmlMatrix::unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const {
  const int64_t at = stored_bytes(stored_, col);
  for (int r = 0; r < count; ++r) unpack_(row_at(row + r) + at, n, to[r]);
}

void GgmlMatrix::read_row(int64_t row, float* out) const {
  if (unpack_ != nullptr) return StoredMatrix::read_row(row, out);
  widen_row(dtype_of(exact()), row_at(row), cols(), out);
  for (int64_t k = 0; k < cols(); ++k) {
    if (!(out[k] - out[k] == 0)) refuse(row, k / kSpanCols * kSpanCols);
  }
}

}  // namespace helm
