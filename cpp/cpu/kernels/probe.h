// What the machine can do at most on one thread: FMA rate and streaming reads, over any vector type.
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

// Eight sequential streams, each prefetched: more lines in flight than one stream's prefetcher keeps.
template <class V>
void probe_read(const void* p, int64_t bytes, float* sink) {
  constexpr int kStreams = 8;
  constexpr int64_t kAhead = 1024, kLine = 64;
  const char* base = static_cast<const char*>(p);
  const int64_t step = bytes / kStreams;
  typename V::F acc[kStreams];
  for (int i = 0; i < kStreams; ++i) acc[i] = V::zero();
  for (int64_t b = 0; b < step; b += kLine) {
    HELM_UNROLL
    for (int i = 0; i < kStreams; ++i) {
      const char* line = base + i * step + b;
      __builtin_prefetch(line + kAhead);
      HELM_UNROLL
      for (int64_t v = 0; v < kLine; v += V::kLanes * 4) {
        acc[i] = V::add(acc[i], V::load(reinterpret_cast<const float*>(line + v)));
      }
    }
  }
  for (int i = 1; i < kStreams; ++i) acc[0] = V::add(acc[0], acc[i]);
  *sink = V::sum(acc[0]);
}

}  // namespace
}  // namespace helm::cpu
