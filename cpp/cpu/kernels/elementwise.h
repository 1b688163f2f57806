// Norms, rotary embedding, activations, conversions and softmax merging, over any vector type.
#pragma once

#include <math.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

// sum_i (x(i) - shift)^power in four chains; lanes past the end count as x = shift.
template <class V, bool kSquare>
HELM_INLINE float sum_shifted(const float* x, int64_t n, float shift) {
  using F = typename V::F;
  constexpr int64_t kChains = 4;
  const F mean = V::set1(shift);
  F acc[kChains] = {V::zero(), V::zero(), V::zero(), V::zero()};
  const auto take = [&](F& a, F v)
                        HELM_LAMBDA_INLINE { a = kSquare ? V::fma(v, v, a) : V::add(a, v); };
  int64_t i = 0;
  for (; i + kChains * V::kLanes <= n; i += kChains * V::kLanes) {
    HELM_UNROLL
    for (int64_t j = 0; j < kChains; ++j)
      take(acc[j], V::sub(V::load(x + i + j * V::kLanes), mean));
  }
  for (; i + V::kLanes <= n; i += V::kLanes) take(acc[0], V::sub(V::load(x + i), mean));
  float rest = 0.0f;
  for (; i < n; ++i) {
    const float v = x[i] - shift;
    rest += kSquare ? v * v : v;
  }
  return V::sum(V::add(V::add(acc[0], acc[1]), V::add(acc[2], acc[3]))) + rest;
}

template <class V>
void rms_norm(const NormArgs& m) {
  for (int64_t t = 0; t < m.tokens; ++t) {
    for (int64_t g = 0; g < m.groups; ++g) {
      const float* x = m.x + t * m.x_stride + g * m.n;
      float* y = m.y + t * m.y_stride + g * m.n;
      const float mean = sum_shifted<V, true>(x, m.n, 0.0f) / static_cast<float>(m.n);
      const typename V::F scale = V::set1(1.0f / __builtin_sqrtf(mean + m.eps));
      const typename V::F plus = V::set1(m.weight_plus);
      for_vectors<V>(m.n, [&](int64_t i, auto load, auto store) HELM_LAMBDA_INLINE {
        const auto out = V::mul(V::mul(load(x + i), scale), V::add(plus, load(m.weight + i)));
        store(y + i, m.accumulate ? V::add(load(y + i), out) : out);
      });
    }
  }
}

template <class V>
void layer_norm(const NormArgs& m) {
  for (int64_t t = 0; t < m.tokens; ++t) {
    for (int64_t g = 0; g < m.groups; ++g) {
      const float* x = m.x + t * m.x_stride + g * m.n;
      float* y = m.y + t * m.y_stride + g * m.n;
      const float n = static_cast<float>(m.n);
      const float mean = sum_shifted<V, false>(x, m.n, 0.0f) / n;
      const float var = sum_shifted<V, true>(x, m.n, mean) / n;
      const typename V::F shift = V::set1(mean);
      const typename V::F scale = V::set1(1.0f / __builtin_sqrtf(var + m.eps));
      const typename V::F plus = V::set1(m.weight_plus);
      for_vectors<V>(m.n, [&](int64_t i, auto load, auto store) HELM_LAMBDA_INLINE {
        const auto unit = V::mul(V::sub(load(x + i), shift), scale);
        const auto w = V::add(plus, load(m.weight + i));
        const auto out = m.bias ? V::fma(unit, w, load(m.bias + i)) : V::mul(unit, w);
        store(y + i, m.accumulate ? V::add(load(y + i), out) : out);
      });
    }
  }
}

inline void rotate_neighbours(float* x, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float x1 = x[2 * i], x2 = x[2 * i + 1];
    x[2 * i] = x1 * cos[i] - x2 * sin[i];
    x[2 * i + 1] = x2 * cos[i] + x1 * sin[i];
  }
}

template <class V>
void rope(const RopeArgs& m) {
  const int64_t half = m.rotary / 2;
  for (int64_t t = 0; t < m.tokens; ++t) {
    const float* cos = m.cos + t * half;
    const float* sin = m.sin + t * half;
    for (int64_t h = 0; h < m.heads; ++h) {
      float* x = m.x + t * m.stride + h * m.head_dim;
      if (m.neighbours) {
        rotate_neighbours(x, cos, sin, half);
        continue;
      }
      for_vectors<V>(half, [&](int64_t i, auto load, auto store) HELM_LAMBDA_INLINE {
        const auto x1 = load(x + i), x2 = load(x + half + i);
        const auto c = load(cos + i), s = load(sin + i);
        store(x + i, V::fnma(x2, s, V::mul(x1, c)));
        store(x + half + i, V::fma(x1, s, V::mul(x2, c)));
      });
    }
  }
}

// x / (1 + exp(-k * x))
template <class V>
HELM_INLINE typename V::F times_sigmoid(typename V::F x, typename V::F kx) {
  return V::div(x, V::add(V::set1(1.0f), exp<V>(V::sub(V::zero(), kx))));
}

// x * Phi(x) = relu(x) - |x|/2 * erfc(|x|/sqrt(2)), erfc by Abramowitz and Stegun 7.1.26 (1.5e-7).
template <class V>
HELM_INLINE typename V::F gelu(typename V::F x) {
  using F = typename V::F;
  const F size = V::max(V::sub(V::zero(), x), x);
  const F z = V::mul(size, V::set1(0.70710678118654752f));
  const F t = V::div(V::set1(1.0f), V::fma(z, V::set1(0.3275911f), V::set1(1.0f)));
  F p = V::set1(1.061405429f);
  p = V::fma(p, t, V::set1(-1.453152027f));
  p = V::fma(p, t, V::set1(1.421413741f));
  p = V::fma(p, t, V::set1(-0.284496736f));
  p = V::mul(V::fma(p, t, V::set1(0.254829592f)), t);
  const F erfc = V::mul(p, exp<V>(V::sub(V::zero(), V::mul(z, z))));
  return V::fnma(V::mul(size, V::set1(0.5f)), erfc, V::max(V::zero(), x));
}

template <class V, Activation A>
HELM_INLINE typename V::F activate(typename V::F x, float factor) {
  using F = typename V::F;
  if constexpr (A == Activation::kScale) return V::mul(V::set1(factor), x);
  if constexpr (A == Activation::kSoftcap) return softcap<V>(x, factor);
  if constexpr (A == Activation::kSilu) return times_sigmoid<V>(x, x);
  if constexpr (A == Activation::kGelu) return gelu<V>(x);
  if constexpr (A == Activation::kRelu) return V::max(V::zero(), x);
  if constexpr (A == Activation::kSwigluLimit) {
    const F low = V::min(V::set1(factor), x);
    return times_sigmoid<V>(low, V::mul(V::set1(1.702f), low));
  }
  // x/2 * (1 + tanh(u)) = x / (1 + exp(-2u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
  const F cubic = V::fma(V::mul(x, x), V::set1(0.044715f), V::set1(1.0f));
  return times_sigmoid<V>(x, V::mul(V::mul(x, V::set1(1.5957691216057308f)), cubic));
}

// What the other half of a gated activation's input counts as.
template <class V, Activation A>
HELM_INLINE typename V::F gated_part(typename V::F up, float factor) {
  if constexpr (A != Activation::kSwigluLimit) return up;
  const auto low = V::min(V::set1(factor), V::max(V::set1(-factor), up));
  return V::add(low, V::set1(1.0f));
}

template <class V, Activation A>
void activation_of(const ActivationArgs& m) {
  const auto keep = [&](float* y, auto out, auto load, auto store)
                        HELM_LAMBDA_INLINE { store(y, m.accumulate ? V::add(load(y), out) : out); };
  for (int64_t t = 0; t < m.tokens; ++t) {
    const float* x = m.x + t * m.x_stride;
    float* y = m.y + t * m.y_stride;
    if (m.gated) {
      for_vectors<V>(m.n, [&](int64_t i, auto load, auto store) HELM_LAMBDA_INLINE {
        const auto up = gated_part<V, A>(load(x + m.n + i), m.factor);
        keep(y + i, V::mul(activate<V, A>(load(x + i), m.factor), up), load, store);
      });
    } else {
      for_vectors<V>(m.n, [&](int64_t i, auto load, auto store) HELM_LAMBDA_INLINE {
        keep(y + i, activate<V, A>(load(x + i), m.factor), load, store);
      });
    }
  }
}

template <class V>
void activation(const ActivationArgs& m) {
  switch (m.kind) {
    case Activation::kSilu:
      return activation_of<V, Activation::kSilu>(m);
    case Activation::kGelu:
      return activation_of<V, Activation::kGelu>(m);
    case Activation::kGeluTanh:
      return activation_of<V, Activation::kGeluTanh>(m);
    case Activation::kRelu:
      return activation_of<V, Activation::kRelu>(m);
    case Activation::kScale:
      return activation_of<V, Activation::kScale>(m);
    case Activation::kSoftcap:
      return activation_of<V, Activation::kSoftcap>(m);
    case Activation::kSwigluLimit:
      return activation_of<V, Activation::kSwigluLimit>(m);
  }
}

template <class V>
void add(const float* x, float* y, int64_t n) {
  for_vectors<V>(n, [&](int64_t i, auto load, auto store)
                        HELM_LAMBDA_INLINE { store(y + i, V::add(load(y + i), load(x + i))); });
}

template <class V, DType D>
void widen(const void* src, float* dst, int64_t n) {
  using E = Elem<V, D>;
  const auto* x = static_cast<const typename E::Store*>(src);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(dst + i, E::load(x + i));
  if (i < n) V::store_n(dst + i, E::load_n(x + i, n - i), n - i);
}

template <class V, DType D>
void narrow(const float* src, void* dst, int64_t n) {
  using E = Elem<V, D>;
  auto* y = static_cast<typename E::Store*>(dst);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) E::store(y + i, V::load(src + i));
  if (i < n) E::store_n(y + i, V::load_n(src + i, n - i), n - i);
}

// A product with 127 / max |x| instead of a quotient by the scale: the same bits in every tier.
template <class V>
float quantize(const float* x, int8_t* q, int64_t n) {
  using F = typename V::F;
  constexpr float kLeastNormal = 0x1p-126f;
  F largest = V::zero(), finite = V::zero();  // the latter becomes NaN where an x is not finite
  for_vectors<V>(n, [&](int64_t i, auto load, auto) HELM_LAMBDA_INLINE {
    const F v = load(x + i);
    largest = V::max(largest, V::max(v, V::sub(V::zero(), v)));
    finite = V::fma(v, V::zero(), finite);
  });
  const bool broken = !(V::sum(finite) == 0.0f);
  const float scale = V::max_lane(largest) / 127.0f;
  if (broken || scale < kLeastNormal) {
    __builtin_memset(q, 0, static_cast<size_t>(n));
    return broken ? __builtin_nanf("") : 0.0f;
  }
  const F inverse = V::set1(127.0f / V::max_lane(largest));
  int64_t i = 0;
  using E = Elem<V, DType::kI8>;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    E::store(q + i, V::round(V::mul(V::load(x + i), inverse)));
  }
  if (i < n) E::store_n(q + i, V::round(V::mul(V::load_n(x + i, n - i), inverse)), n - i);
  return scale;
}

// m = max(m_a, m_b), s = s_a e^(m_a - m) + s_b e^(m_b - m), o likewise; an empty side has m = -inf.
template <class V>
void attention_merge(int64_t rows, int64_t head_dim, float* m_a, float* s_a, float* o_a,
                     const float* m_b, const float* s_b, const float* o_b) {
  for (int64_t r = 0; r < rows; ++r, o_a += head_dim, o_b += head_dim) {
    if (m_b[r] == -__builtin_inff()) continue;
    const float m = m_b[r] > m_a[r] ? m_b[r] : m_a[r];
    const float scale_a = expf(m_a[r] - m), scale_b = expf(m_b[r] - m);
    m_a[r] = m;
    s_a[r] = s_a[r] * scale_a + s_b[r] * scale_b;
    const auto va = V::set1(scale_a), vb = V::set1(scale_b);
    for_vectors<V>(head_dim, [&](int64_t i, auto load, auto store) HELM_LAMBDA_INLINE {
      store(o_a + i, V::fma(load(o_b + i), vb, V::mul(load(o_a + i), va)));
    });
  }
}

template <class V>
void attention_finish(int64_t rows, int64_t head_dim, const float* s, float* o) {
  for (int64_t r = 0; r < rows; ++r, o += head_dim) {
    const auto scale = V::set1(s[r] == 0.0f ? 0.0f : 1.0f / s[r]);
    for_vectors<V>(head_dim, [&](int64_t i, auto load, auto store)
                                 HELM_LAMBDA_INLINE { store(o + i, V::mul(load(o + i), scale)); });
  }
}

}  // namespace
}  // namespace helm::cpu
