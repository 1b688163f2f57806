// Names of element types.
#include "helm/types.h"

#include "base/check.h"

namespace helm {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "?";
}

DType dtype_from_name(std::string_view name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  fail(ErrorKind::kInvalid, "unknown dtype \"", name, "\"; known: f32, f16, bf16");
}

}  // namespace helm
