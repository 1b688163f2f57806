// Integer products of avxvnni. The target's compile flags decide whether they exist
// (cmake/isa.cmake).
#include "cpu/kernels/quant/integer.h"

#ifdef __AVXVNNI__
#include "cpu/kernels/quant/ints_avxvnni.h"
#include "cpu/kernels/quant/table.h"
#endif

namespace helm::cpu {

const IntegerTable* integer_avxvnni() {
#ifdef __AVXVNNI__
  static constexpr IntegerTable kTable = make_integer_table<IntsAvxVnni>("avxvnni");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace helm::cpu
