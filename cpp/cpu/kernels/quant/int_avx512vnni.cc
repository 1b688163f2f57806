// Integer products of avx512vnni. The target's compile flags decide whether they exist
// (cmake/isa.cmake).
#include "cpu/kernels/quant/integer.h"

#ifdef __AVX512VNNI__
#include "cpu/kernels/quant/ints_avx512.h"
#include "cpu/kernels/quant/table.h"
#endif

namespace helm::cpu {

const IntegerTable* integer_avx512vnni() {
#ifdef __AVX512VNNI__
  static constexpr IntegerTable kTable = make_integer_table<IntsAvx512Vnni>("avx512vnni");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
