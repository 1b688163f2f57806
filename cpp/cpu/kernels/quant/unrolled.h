// Loops that the compiler unrolls, and constants for them.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/kernels/vec.h"

namespace helm::cpu {
namespace {

template <int N>
struct Index {
  static constexpr int value = N;
};
template <class Body, int... I>
HELM_INLINE void each_index_of([[maybe_unused]] Body body, std::integer_sequence<int, I...>) {
  (body(Index<I>{}), ...);
}
// body(Index<i>) for i below N.
template <int N, class Body>
HELM_INLINE void each_index(Body body) {
  each_index_of(body, std::make_integer_sequence<int, N>());
}

// The vectors of rows of a tile: S strips of P each.
template <int S, int P>
struct Vectors {
  // body(s, p) for all of them.
  template <class Body>
  HELM_INLINE static void each_vector(Body body) {
    HELM_UNROLL
    for (int s = 0; s < S; ++s) {
      HELM_UNROLL
      for (int p = 0; p < P; ++p) body(s, p);
    }
  }
};

constexpr int log2_of(int64_t n) {
  return n <= 1 ? 0 : 1 + log2_of(n / 2);
}

}  // namespace
}  // namespace helm::cpu
