// Integer products of avx2. The target's compile flags decide whether they exist
// (cmake/isa.cmake).
#include "cpu/kernels/quant/integer.h"

#ifdef __AVX2__
#include "cpu/kernels/quant/ints_avx2.h"
#include "cpu/kernels/quant/table.h"
#endif

namespace helm::cpu {

const IntegerTable* integer_avx2() {
#ifdef __AVX2__
  static constexpr IntegerTable kTable = make_integer_table<IntsAvx2>("avx2");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
