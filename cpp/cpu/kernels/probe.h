// What the machine can do at most on one thread: FMA rate and streaming reads, over any vector
// type.
#pragma once

#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

// Twelve chains cover FMA latency times ports on every known core and fit in sixteen registers.
template <class V>
double probe_fma(int64_t rounds, float* sink) {
  constexpr int kChains = 12;
  constexpr int kUnroll = 8;
  typename V::F acc[kChains];
  const auto x = V::set1(*sink), y = V::set1(1e-9f);
  for (int i = 0; i < kChains; ++i) acc[i] = V::set1(static_cast<float>(i));
  for (int64_t n = 0; n < rounds; ++n) {
    HELM_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      HELM_UNROLL
      for (int i = 0; i < kChains; ++i) acc[i] = V::fma(acc[i], x, y);
    }
  }
  for (int i = 1; i < kChains; ++i) acc[0] = V::add(acc[0], acc[i]);
  *sink = V::sum(acc[0]);
  return 2.0 * kChains * kUnroll * V::kLanes * static_cast<double>(rounds);
}

// One line, and requests for later ones: to L2 those at kFar bytes, to L1 those at kNear.
template <class V, int64_t kFar, int64_t kNear>
HELM_INLINE typename V::F read_line(const char* line, typename V::F acc) {
  if constexpr (kFar > 0) __builtin_prefetch(line + kFar, 0, 2);
  __builtin_prefetch(line + kNear);
  HELM_UNROLL
  for (int64_t v = 0; v < kLineBytes; v += V::kLanes * 4) {
    acc = V::add(acc, V::load(reinterpret_cast<const float*>(line + v)));
  }
  return acc;
}

// kStreams sequential streams at once, then the lines that are left.
template <class V, int kStreams, int64_t kFar, int64_t kNear>
void probe_read(const void* p, int64_t bytes, float* sink) {
  const char* base = static_cast<const char*>(p);
  const int64_t step = bytes / kStreams / kLineBytes * kLineBytes;
  typename V::F acc[kStreams];
  for (int i = 0; i < kStreams; ++i) acc[i] = V::zero();
  for (int64_t b = 0; b < step; b += kLineBytes) {
    HELM_UNROLL
    for (int i = 0; i < kStreams; ++i) {
      acc[i] = read_line<V, kFar, kNear>(base + i * step + b, acc[i]);
    }
  }
  for (int64_t b = kStreams * step; b < bytes; b += kLineBytes) {
    acc[0] = read_line<V, kFar, kNear>(base + b, acc[0]);
  }
  for (int i = 1; i < kStreams; ++i) acc[0] = V::add(acc[0], acc[i]);
  *sink = V::sum(acc[0]);
}

}  // namespace
}  // namespace helm::cpu
