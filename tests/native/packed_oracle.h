// Packed matrices, read by a naive walk over their bytes that shares nothing with helm/tiles.h and
// the kernels, and what products with them must give.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kernels/quant/integer.h"
#include "oracle.h"
#include "support/check.h"

namespace helm::test {

// One weight: s * number + m, where a product of integers takes `number`.
struct PackedWeight {
  float s, m;  // m is 0 where the scales have no minimum
  int number;
};

struct Packed {
  Format format;
  int64_t rows, cols;
  std::vector<unsigned char> bytes;   // format_bytes
  std::vector<PackedWeight> weights;  // [rows, padded columns], as the walk reads them
  int64_t stride;                     // of weights

  const PackedWeight& at(int64_t r, int64_t k) const {
    return weights[static_cast<size_t>(r * stride + k)];
  }
};

std::vector<Format> packed_formats();
// Random codes, and scales of about one over the codes' range.
Packed random_packed(const Format& format, int64_t rows, int64_t cols, uint32_t seed);

// n(k) of cpu::QuantBlock.
int integer_at(const cpu::QuantBlock& block, int64_t k);
// C(t, r) of cpu::QuantArgs, step by step in floats, `before` being what C held.
float chain(const Packed& w, int64_t r, const cpu::QuantBlock* a, bool accumulate, float before,
            const float* bias);
// The same sum in double precision, with what roundings of its steps may add up to.
struct ExactSum {
  double value, bound;
};
ExactSum exact_sum(const Packed& w, int64_t r, const cpu::QuantBlock* a, double start);

}  // namespace helm::test
