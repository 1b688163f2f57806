// Naive reference in double precision. Shares nothing with the kernels but the argument types.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace helm::test {

inline constexpr double kEps = 1.1920928955078125e-7;  // 2^-23

double decode_f16(uint16_t h);
double decode_bf16(uint16_t h);
uint16_t encode_f16(float x);   // nearest even, by arithmetic on doubles
uint16_t encode_bf16(float x);  // nearest even, by arithmetic on doubles
double decode(DType dtype, const void* data, int64_t i);

// A row as integers of -127 to 127 and the scale by which they count, see KernelTable::quantize.
struct Quantized {
  std::vector<int8_t> q;
  float scale;
};
Quantized quantized(const std::vector<float>& x);

// `values` rounded to dtype, as bytes; of i8 the integers of any values.
std::vector<unsigned char> encode(DType dtype, const std::vector<float>& values);

struct Expected {
  std::vector<double> value;
  std::vector<double> bound;  // allowed |error| of an f32 computation in any order
};

// A rounded to `activations` first.
Expected oracle_matmul(const cpu::MatmulArgs& args, DType dtype, const std::vector<float>& c_before,
                       DType activations = DType::kF32);

struct ExpectedAttention {
  Expected m, log_sum, out;  // maximum, m + log s, o / s;  -inf, -inf and 0 for masked rows
};
// inputs: what scaled queries and weights are rounded to. weights: to what weights alone may be;
// queries are then as exact as two numbers of that dtype.
ExpectedAttention oracle_attention(const cpu::AttentionArgs& args, DType dtype,
                                   DType inputs = DType::kF32, DType weights = DType::kF32);

Expected oracle_norm(const cpu::NormArgs& args, bool rms);
double oracle_activation(cpu::Activation kind, double x, double factor = 1);

}  // namespace helm::test
