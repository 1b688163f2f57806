#include "cpu/weight_format.h"

#include "cpu/kernels/compressed.h"

namespace helm::cpu {

bool is_compressed(const Plan& plan, const TensorSpec& tensor) {
  return plan.loading == WeightLoading::kCompressed && tensor.dtype == DType::kBF16 &&
         tensor.shape.size() == 2 && tensor.shape[1] <= kMostCompressedCols &&
         CompressedMatrix::bytes(tensor.shape[0], tensor.shape[1]) < tensor.bytes();
}

int64_t host_bytes(const Plan& plan, const TensorSpec& tensor) {
  if (!is_compressed(plan, tensor)) return tensor.bytes();
  return CompressedMatrix::bytes(tensor.shape[0], tensor.shape[1]);
}

int64_t read_bytes(const Plan& plan, const TensorSpec& tensor) {
  if (!is_compressed(plan, tensor)) return tensor.bytes();
  return CompressedMatrix::read_bytes(tensor.shape[0], tensor.shape[1]);
}

}  // namespace helm::cpu
