// Naive reference in double precision: one loop per sum, no blocking, no vectors.
#include "oracle.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace helm::test {
namespace {

constexpr double kTiny = 1e-36;  // below f32's normal range, errors are absolute
constexpr double kInf = std::numeric_limits<double>::infinity();

size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

// x rounded to `mantissa` fraction bits with exponents from `lowest`, ties to even.
double round_to(double x, int mantissa, int lowest) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int e = std::max(std::ilogb(x), lowest);
  return std::ldexp(std::nearbyint(std::ldexp(x, mantissa - e)), e - mantissa);
}

}  // namespace

double decode_f16(uint16_t h) {
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return fraction ? std::nan("") : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double decode_bf16(uint16_t h) {
  return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
}

uint16_t encode_f16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7e00;
  const double r = std::abs(round_to(x, 10, -14));
  if (r >= 65536.0) return sign | 0x7c00;
  if (r < std::ldexp(1, -14)) return static_cast<uint16_t>(sign | std::lround(std::ldexp(r, 24)));
  const int e = std::ilogb(r);
  return static_cast<uint16_t>(sign | (e + 15) << 10 | (std::lround(std::ldexp(r, 10 - e)) - 1024));
}

uint16_t encode_bf16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const double r = round_to(x, 7, -126);
  const float f =
      std::abs(r) >= std::ldexp(1.0, 128) ? std::copysign(INFINITY, x) : static_cast<float>(r);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(f) >> 16);
}

double decode(DType dtype, const void* data, int64_t i) {
  const char* p = static_cast<const char*>(data) + i * dtype_bytes(dtype);
  if (dtype == DType::kI8) return static_cast<signed char>(*p);
  if (dtype == DType::kF32) {
    float f;
    std::memcpy(&f, p, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p, 2);
  return dtype == DType::kF16 ? decode_f16(h) : decode_bf16(h);
}

Quantized quantized(const std::vector<float>& x) {
  Quantized out{std::vector<int8_t>(x.size()), 0};
  float largest = 0;
  for (float v : x) {
    if (!std::isfinite(v)) {
      out.scale = NAN;
      return out;
    }
    largest = std::max(largest, std::abs(v));
  }
  const float scale = largest / 127;
  if (scale < std::numeric_limits<float>::min()) return out;
  out.scale = scale;
  const float inverse = 127 / largest;
  for (size_t i = 0; i < x.size(); ++i) {
    out.q[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
  }
  return out;
}

std::vector<unsigned char> encode(DType dtype, const std::vector<float>& values) {
  if (dtype == DType::kI8) {
    std::vector<unsigned char> bytes;
    for (int8_t q : quantized(values).q) bytes.push_back(static_cast<unsigned char>(q));
    return bytes;
  }
  const size_t size = at(dtype_bytes(dtype));
  std::vector<unsigned char> out(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == DType::kF16 ? encode_f16(values[i]) : encode_bf16(values[i]);
    if (size == 4) {
      std::memcpy(&out[i * size], &values[i], size);
    } else {
      std::memcpy(&out[i * size], &half, size);
    }
  }
  return out;
}

Expected oracle_matmul(const cpu::MatmulArgs& m, DType dtype, const std::vector<float>& c_before,
                       DType activations) {
  Expected e;
  const auto input = [&](int64_t i) -> double {
    const float a = m.a[i];
    return activations == DType::kBF16 ? decode_bf16(encode_bf16(a)) : a;
  };
  for (int64_t t = 0; t < m.tokens; ++t) {
    for (int64_t r = 0; r < m.rows; ++r) {
      double sum = 0, size = 0;
      const auto take = [&](double v) { sum += v, size += std::abs(v); };
      if (m.accumulate) take(c_before[at(t * m.c_stride + r)]);
      if (m.bias) take(m.bias[r]);
      for (int64_t k = 0; k < m.cols; ++k) {
        take(input(t * m.a_stride + k) * decode(dtype, m.w, r * m.cols + k));
      }
      e.value.push_back(sum);
      e.bound.push_back(static_cast<double>(m.cols + 3) * kEps * size + kTiny);
    }
  }
  return e;
}

// A score's error d moves its weight by a factor e^d, the maximum and the log of the sum by d.
ExpectedAttention oracle_attention(const cpu::AttentionArgs& a, DType dtype, DType inputs,
                                   DType weights) {
  const auto unit = [](DType t) {
    return t == DType::kBF16 ? 0x1p-8 : t == DType::kF16 ? 0x1p-11 : 0;
  };
  ExpectedAttention e;
  const bool narrow = inputs == DType::kBF16;
  const double query_eps = unit(weights) * unit(weights);
  const double weight_eps = std::max(unit(inputs), unit(weights));
  const auto query = [&](int64_t i) -> double {
    const double exact = static_cast<double>(a.scale) * static_cast<double>(a.q[i]);
    return narrow ? decode_bf16(encode_bf16(a.scale * a.q[i])) : exact;
  };
  const auto element = [&](const void* rows, const float* scales, int64_t j, int64_t d) {
    return decode(dtype, rows, j * a.head_dim + d) * (scales ? static_cast<double>(scales[j]) : 1);
  };
  // What a key lacks: its pair of the bias, turned by the block's position and by the place in it.
  const int64_t half = a.rotary / 2;
  const auto lacking = [&](int64_t j, int64_t d, double* size) -> double {
    if (a.bias == nullptr || d >= a.rotary) return 0;
    const int64_t pair = d % half;
    const float* turns[] = {a.block_turns + j / cpu::kKeyBlock * a.rotary,
                            a.place_turns + j % cpu::kKeyBlock * a.rotary};
    double x = a.bias[pair], y = a.bias[half + pair];
    *size = std::abs(x) + std::abs(y);
    for (const float* turn : turns) {
      const double cos = turn[pair], sin = turn[half + pair], before = x;
      x = before * cos - y * sin;
      y = y * cos + before * sin;
    }
    return d < half ? x : y;
  };
  const int64_t roundings = a.head_dim + (a.span.k_scale ? 4 : 3) + (a.bias ? 8 : 0);
  const auto none = [](Expected& x, double v) { x.value.push_back(v), x.bound.push_back(0); };
  for (int64_t row = 0; row < a.queries * a.group; ++row) {
    const int64_t i = row / a.group, g = row % a.group;
    std::vector<double> score, weight;
    std::vector<int64_t> key;
    double slack = 0, max = -kInf, sum = 0;
    for (int64_t j = 0; j < a.span.count; ++j) {
      const int64_t distance = a.first_query + i - (a.first_key + j);
      if (distance < 0 || (a.window > 0 && distance >= a.window)) continue;
      double dot = 0, size = 0;
      for (int64_t d = 0; d < a.head_dim; ++d) {
        const double q = query(i * a.q_stride + g * a.head_dim + d);
        const double k = element(a.span.k, a.span.k_scale, j, d);
        double more = 0;
        dot += q * (k + lacking(j, d, &more));
        size += std::abs(q) * (std::abs(k) + 2 * more);
      }
      slack = std::max(slack, (static_cast<double>(roundings) * kEps + query_eps) * size);
      if (a.softcap > 0) {
        dot = a.softcap * std::tanh(dot / a.softcap);
        slack += 8 * kEps * std::abs(dot);
      }
      key.push_back(j), score.push_back(dot);
      max = std::max(max, dot);
    }
    for (double s : score) weight.push_back(std::exp(s - max)), sum += weight.back();
    if (key.empty()) {
      none(e.m, -kInf), none(e.log_sum, -kInf);
      for (int64_t d = 0; d < a.head_dim; ++d) none(e.out, 0);
      continue;
    }
    const double step = static_cast<double>(key.size() + 24) * kEps + 2 * kEps * std::abs(max);
    e.m.value.push_back(max), e.m.bound.push_back(slack + kTiny);
    e.log_sum.value.push_back(max + std::log(sum)), e.log_sum.bound.push_back(slack + step);
    for (int64_t d = 0; d < a.head_dim; ++d) {
      double out = 0, size = 0;
      for (size_t n = 0; n < key.size(); ++n) {
        const double v = weight[n] / sum * element(a.span.v, a.span.v_scale, key[n], d);
        out += v, size += std::abs(v);
      }
      e.out.value.push_back(out);
      e.out.bound.push_back((2 * slack + 2 * step + weight_eps) * size + kTiny);
    }
  }
  return e;
}

Expected oracle_norm(const cpu::NormArgs& m, bool rms) {
  Expected e;
  const double n = static_cast<double>(m.n);
  for (int64_t t = 0; t < m.tokens; ++t) {
    for (int64_t g = 0; g < m.groups; ++g) {
      const float* x = m.x + t * m.x_stride + g * m.n;
      double mean = 0, size = 0, square = 0;
      for (int64_t i = 0; i < m.n && !rms; ++i) mean += x[i] / n, size += std::abs(x[i]) / n;
      for (int64_t i = 0; i < m.n; ++i) square += (x[i] - mean) * (x[i] - mean) / n;
      const double scale = 1 / std::sqrt(square + m.eps);
      for (int64_t i = 0; i < m.n; ++i) {
        const double unit = (x[i] - mean) * scale;
        const double bias = m.bias && !rms ? m.bias[i] : 0;
        const double weight = m.weight_plus + m.weight[i];
        const double held = m.accumulate ? m.y[t * m.y_stride + g * m.n + i] : 0;
        e.value.push_back(held + unit * weight + bias);
        // The mean's own error shifts every element and (second order in it) the variance.
        const double shift = (n + 2) * kEps * size * scale;
        const double relative = (n + 8) * kEps + shift * shift;
        e.bound.push_back(std::abs(weight) * (relative * std::abs(unit) + shift) +
                          2 * kEps * (std::abs(held) + std::abs(bias) + std::abs(unit * weight)) +
                          kTiny);
      }
    }
  }
  return e;
}

double oracle_activation(cpu::Activation kind, double x, double factor) {
  switch (kind) {
    case cpu::Activation::kScale:
      return factor * x;
    case cpu::Activation::kSoftcap:
      return factor * std::tanh(x / factor);
    case cpu::Activation::kSilu:
      return x / (1 + std::exp(-x));
    case cpu::Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case cpu::Activation::kGeluTanh:
      // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), without the cancellation at negative u
      return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case cpu::Activation::kRelu:
      return x > 0 ? x : 0;
    case cpu::Activation::kSwigluLimit: {
      const double low = std::min(x, factor);
      return low / (1 + std::exp(-1.702 * low));
    }
  }
  return std::nan("");
}

}  // namespace helm::test
