#include "cpu/compression.h"

#include <cstring>
#include <vector>

namespace helm::cpu {
namespace {

// Weight `at` of a chunk, unless it is an escape.
uint16_t weight_in(const KernelTable& kernels, const uint8_t* chunk, int64_t at, uint8_t base) {
  const Place place = kernels.compressed_place(static_cast<int>(at));
  const int code = chunk[place.code] >> place.shift;
  const int high = (code & 8) << 4 | (base + (code & 7));
  return static_cast<uint16_t>(high << 8 | chunk[place.low]);
}

}  // namespace

void make_compressed_noise(std::byte* data, int64_t rows, int64_t cols) {
  constexpr CompressedRow kHeader{0, 0x38};  // numbers of 2^-15 to 2
  std::byte* headers = data + CompressedMatrix::rows_at(rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(headers + r * int64_t{sizeof(kHeader)}, &kHeader, sizeof(kHeader));
  }
}

void read_compressed(const KernelTable& kernels, const CompressedMatrix& matrix, int64_t row,
                     int64_t col, int64_t n, uint16_t* out) {
  const CompressedMatrix m = matrix.from(row);
  const auto* from = reinterpret_cast<const uint8_t*>(m.chunks);
  const CompressedRow& header = *m.rows;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t k = col + i;
    out[i] = weight_in(kernels, from + k / kChunk * kChunkBytes, k % kChunk, header.base());
  }
  for (int64_t i = 0; i < header.escapes(); ++i) {
    const Escape& escape = m.escapes[header.first_escape + i];
    if (escape.col >= col && escape.col < col + n) out[escape.col - col] = escape.bits;
  }
}

bool Compression::put(const KernelTable& kernels, int64_t row, const uint16_t* weights) {
  thread_local std::vector<Escape> found;
  found.resize(static_cast<size_t>(cols_));
  uint8_t base = 0;
  std::byte* chunks = chunks_ + row * compressed_row_bytes(cols_);
  const int64_t count = kernels.compress_row(weights, cols_, chunks, &base, found.data(), cols_);
  const int64_t first = count == 0 ? 0 : taken_.fetch_add(count);
  if (first + count > most_) return false;
  const CompressedRow header{static_cast<uint32_t>(first),
                             static_cast<uint32_t>(count) << 8 | base};
  std::memcpy(rows_ + row * int64_t{sizeof(header)}, &header, sizeof(header));
  std::memcpy(escapes_ + first * int64_t{sizeof(Escape)}, found.data(),
              static_cast<size_t>(count) * sizeof(Escape));
  return true;
}

}  // namespace helm::cpu
