// Integer products in plain C++, whose bits all others give.
#include "cpu/kernels/quant/ints_scalar.h"
#include "cpu/kernels/quant/table.h"

namespace helm::cpu {

const IntegerTable* integer_scalar() {
  static constexpr IntegerTable kTable = make_integer_table<IntsScalar>("scalar");
  return &kTable;
}

}  // namespace helm::cpu
