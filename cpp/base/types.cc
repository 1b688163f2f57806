// Names of element types and of the formats of weights.
#include "helm/types.h"

#include <string>

#include "base/check.h"
#include "helm/format.h"

namespace helm {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kI8:
      return "i8";
  }
  return "?";
}

namespace {

DType one_of(int count, const char* what, std::string_view name) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (name == dtype_name(dtype)) return dtype;
    known += (i > 0 ? ", " : "") + std::string(dtype_name(dtype));
  }
  fail(ErrorKind::kInvalid, "unknown ", what, " \"", name, "\"; known: ", known);
}

}  // namespace

DType dtype_from_name(std::string_view name) {
  return one_of(kDTypes, "dtype", name);
}

DType kv_dtype_from_name(std::string_view name) {
  return one_of(kKvDTypes, "KV dtype", name);
}

Format format_from_name(std::string_view name) {
  std::string known;
  for (const FormatRow& row : kFormats) {
    if (name == row.name) return row.format;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  fail(ErrorKind::kInvalid, "[format] no format has the name \"", name, "\"; known: ", known);
}

}  // namespace helm
