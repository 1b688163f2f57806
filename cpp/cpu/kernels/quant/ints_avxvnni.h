// Integers of eight rows in AVX2 with AVX-VNNI's dot products. Knows nothing of the kernels over
// it.
#pragma once

#include "cpu/kernels/quant/ints_avx2.h"

namespace helm::cpu {
namespace {

struct IntsAvxVnni : IntsAvx2 {
  static constexpr bool kSigned = false;

  template <bool Signed>
  struct Bytes {
    I w;
    HELM_INLINE explicit Bytes(I bytes) : w(bytes) {}
  };
  template <bool Signed, int kMost, int N>
  struct Sum {
    static constexpr bool kTwo = false;  // see IntsAvx2
    I total;

    HELM_INLINE void begin(I start) { total = start; }
    template <int Which>
    HELM_INLINE void add(const Bytes<Signed>& w, I a) {
      total = _mm256_dpbusd_avx_epi32(total, w.w, a);
      barrier(total);
    }
  };
};

}  // namespace
}  // namespace helm::cpu
