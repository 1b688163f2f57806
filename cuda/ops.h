// Ops of a plan bound to their buffers as launches of kernels and products of cuBLAS. Knows nothing
// of graphs or of how a step's tables reach the GPU.
#pragma once

#include <memory>
#include <vector>

#include "cuda/cublas.h"
#include "cuda/kernels/kernels.h"
#include "cuda/step_tables.h"
#include "cuda/workspace.h"
#include "device/device.h"

namespace helm::cuda {

// All that a launch depends on beside the tables: steps of equal shape launch alike.
struct StepShape {
  int64_t tokens;
  int64_t outputs;
  int64_t runs;
  int64_t singles;        // runs of one token
  int64_t decode_splits;  // of attention, for those
  int64_t prompt_splits;  // for the others
  int64_t rows;  // of the runs; fewer than tokens where a step attends for some sequences only
  int64_t first_run = 0;  // of those in the tables

  bool decodes() const { return singles == runs; }  // every run has one token

  bool operator==(const StepShape&) const = default;
};

struct StepContext {
  StepShape shape;
  StepTables tables;
  Blas& blas;
  Queue queue;

  int64_t rows(bool per_output) const { return per_output ? shape.outputs : shape.tokens; }
};

// One op with its buffers bound.
class BoundOp {
 public:
  virtual ~BoundOp() = default;
  virtual const char* name() const = 0;  // for messages
  virtual void launch(const StepContext& context) const = 0;
};

// Where packed weights become a matrix for cuBLAS, as many rows at a time as fit.
struct Panel {
  void* memory;
  int64_t bytes;
  DType dtype;  // f16 or bf16

  int64_t rows(int64_t cols) const { return panel_rows(bytes, cols); }
};

// Buffers that ops are bound to.
struct Bindings {
  const StageSpec& spec;
  const StepUpload& upload;
  std::byte* narrow;  // WorkspaceLayout::narrow_offset
  Panel panel;        // WorkspaceLayout::panel_offset
  void* partials;     // WorkspaceLayout::partials_offset
  int compute;        // the GPU's capability times ten

  const TensorSpec& tensor(TensorIndex index) const {
    return spec.plan->tensors[static_cast<size_t>(index)];
  }
  const void* weight(TensorIndex index) const {
    return reinterpret_cast<const void*>(spec.weights[static_cast<size_t>(index)].address);
  }
  const Format& format(TensorIndex index) const {
    return spec.weights[static_cast<size_t>(index)].format;
  }
  const float* vector(TensorIndex index) const {  // [size], null for kNoTensor
    return index == kNoTensor ? nullptr : static_cast<const float*>(weight(index));
  }
  float* value(ValueIndex index) const {
    return reinterpret_cast<float*>(spec.values[static_cast<size_t>(index)]);
  }
  int64_t width(ValueIndex index) const {
    return spec.plan->values[static_cast<size_t>(index)].width;
  }
  bool per_output(ValueIndex index) const {
    return spec.plan->values[static_cast<size_t>(index)].per_output;
  }
};

// The ops of all units in order; a rope right before the attention that it serves is fused with the
// appending of K and V.
std::vector<std::unique_ptr<BoundOp>> bind_ops(const Bindings& bindings);

// narrowed: to what the op before has narrowed the input where it has many rows; f32: not at all.
// cuda/linear_op.cc.
std::unique_ptr<BoundOp> bind_linear(const LinearOp& op, DType narrowed, const Bindings& bindings);

std::unique_ptr<BoundOp> bind_mixture(const RouteOp& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_mixture(const ExpertsOp& op, const Bindings& bindings);

// Attention and its pieces (cuda/attention_ops.cc). `rope`: rotates what is appended, or null.
std::unique_ptr<BoundOp> bind_attention(const AttentionOp& op, const RopeOp* rope,
                                        const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const AppendOp& op, const RopeOp* rope,
                                        const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const ResetOp& op, const RopeOp* rope,
                                        const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const AttendOp& op, const RopeOp* rope,
                                        const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const MergeOp& op, const RopeOp* rope,
                                        const Bindings& bindings);
RopeArgs bind_rope(const RopeOp& op, const Bindings& bindings);
// Whether `op` appends keys that the rope rotates last, so that append() can do it on the way.
bool rotates_keys_of(const RopeOp& rope, const Op& op, const Bindings& bindings);

}  // namespace helm::cuda
