#include "cuda/narrowing.h"

#include <algorithm>
#include <variant>

namespace helm::cuda {
namespace {

const ValueSpec& value_of(const Plan& plan, ValueIndex index) {
  return plan.values[static_cast<size_t>(index)];
}

// Whether a norm or activation writes all of this value, row by row.
bool makes(const Plan& plan, const Op& op, ValueIndex value) {
  const ValueSpec& spec = value_of(plan, value);
  const auto from = [&](ValueIndex in) { return value_of(plan, in).per_output == spec.per_output; };
  if (const auto* norm = std::get_if<NormOp>(&op)) {
    return norm->out == value && !norm->accumulate && norm->out_offset == 0 &&
           norm->groups * norm->size == spec.width && from(norm->in);
  }
  const auto* activation = std::get_if<ActivationOp>(&op);
  return activation != nullptr && activation->out == value && !activation->accumulate &&
         activation->size == spec.width && from(activation->in);
}

// The 16-bit dtype that cuBLAS takes of all of a product's weights, or f32.
DType narrow_dtype(const Plan& plan, const UnitSpec& unit, const LinearOp& product, DType packed) {
  const auto dtype = [&](const LinearOp::Part& part) {
    const Format format = plan.format(unit, part.weight);
    return is_packed(format) ? packed : is_dense(format) ? dtype_of(format) : DType::kF32;
  };
  const DType first = dtype(product.parts.front());
  const bool same = std::ranges::all_of(
      product.parts, [&](const LinearOp::Part& part) { return dtype(part) == first; });
  return same ? first : DType::kF32;
}

// `next` is an op of the unit.
DType dtype_between(const Plan& plan, const Op& op, const UnitSpec& unit, const Op& next,
                    DType packed) {
  const auto* product = std::get_if<LinearOp>(&next);
  if (product == nullptr || !makes(plan, op, product->in)) return DType::kF32;
  return narrow_dtype(plan, unit, *product, packed);
}

bool reads(const Plan& plan, const Op& op, ValueIndex value) {
  bool found = false;
  each_value(plan, op, [&](ValueIndex v, Access access) {
    found = found || (v == value && access != Access::kWrite);
  });
  return found;
}

// Whether all that reads the value are products that find it narrowed.
bool read_narrowed_only(const Plan& plan, ValueIndex value, DType packed) {
  if (value == plan.logits) return false;
  for (const UnitSpec& unit : plan.units) {
    for (size_t i = 0; i < unit.ops.size(); ++i) {
      if (!reads(plan, unit.ops[i], value)) continue;
      if (i == 0) return false;
      if (dtype_between(plan, unit.ops[i - 1], unit, unit.ops[i], packed) == DType::kF32) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

Narrowing narrowing_between(const Plan& plan, const Op& op, const UnitSpec& unit, const Op& next,
                            DType packed) {
  const DType dtype = dtype_between(plan, op, unit, next, packed);
  if (dtype == DType::kF32) return {};
  return {dtype, read_narrowed_only(plan, std::get<LinearOp>(next).in, packed)};
}

}  // namespace helm::cuda
