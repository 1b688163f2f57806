// A stage on the CPU: a run of units compiled once into a static program over bound buffers.
// Nothing is allocated, looked up or decided per token beyond the shape of the step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kv_page.h"
#include "helm/plan.h"

namespace helm::cpu {

// One sequence's rows in a step.
struct SequenceRun {
  int64_t first_row;       // of the step
  int64_t tokens;          // consecutive rows
  int64_t first_position;  // of the first row in its sequence
  const int32_t* pages;    // [blocks, layers], covering first_position + tokens positions
};

// What one step works on. Rows of one sequence are consecutive.
struct StepView {
  std::span<const int32_t> token_ids;    // [tokens]
  std::span<const int32_t> positions;    // [tokens]
  std::span<const int32_t> output_rows;  // [outputs], rows whose logits are wanted
  std::span<const SequenceRun> runs;

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t outputs() const { return static_cast<int64_t>(output_rows.size()); }
};

// One op with its buffers bound. Called by every member of the team, which meets afterwards.
class BoundOp {
 public:
  virtual ~BoundOp() = default;
  virtual void run(const StepView& step, Team& team) const = 0;
};

// Buffers that ops are bound to.
struct Bindings {
  const Plan& plan;
  std::span<const void* const> weights;  // by TensorIndex
  KvPages kv;
  const KernelTable& kernels;
  std::vector<float*> values;       // by ValueIndex, [rows, width]
  std::vector<float*> cosines;      // by rope table, [step_tokens, rotary / 2], filled per step
  std::vector<float*> sines;        // likewise
  std::vector<std::byte*> scratch;  // by worker
  std::byte* partials;              // shared by the members, attention_partials_bytes()

  const void* weight(TensorIndex tensor) const { return weights[static_cast<size_t>(tensor)]; }
  const float* vector(TensorIndex tensor) const {  // [size], null for kNoTensor
    return tensor == kNoTensor ? nullptr : static_cast<const float*>(weight(tensor));
  }
  float* value(ValueIndex index) const { return values[static_cast<size_t>(index)]; }
  int64_t width(ValueIndex index) const { return plan.values[static_cast<size_t>(index)].width; }
  bool per_output(ValueIndex index) const {
    return plan.values[static_cast<size_t>(index)].per_output;
  }
};

class CpuStage {
 public:
  // `plan`, `weights` (by TensorIndex) and the pages must outlive the stage.
  CpuStage(const Plan& plan, std::span<const UnitSpec> units, std::span<const void* const> weights,
           KvPages kv, const KernelTable& kernels, int threads);
  ~CpuStage();
  CpuStage(const CpuStage&) = delete;  // ops refer to the bindings
  CpuStage& operator=(const CpuStage&) = delete;

  void run(const StepView& step, ThreadPool& threads) const;
  const float* value(ValueIndex index) const { return bindings_.value(index); }
  float* value(ValueIndex index) { return bindings_.value(index); }
  int64_t activations_bytes() const { return values_.bytes(); }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  void bind_values();
  void bind_workspace(int threads);
  void fill_rope_tables(const StepView& step, Team& team) const;

  const Plan& plan_;
  Arena values_;
  Arena workspace_;
  Bindings bindings_;
  std::vector<std::unique_ptr<BoundOp>> ops_;
};

// Binds one op of the plan (cpp/cpu/ops.cc, cpp/cpu/attention.cc).
std::unique_ptr<BoundOp> bind_op(const Op& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const AttentionOp& op, const Bindings& bindings);

// Sizes of the attention's working memory: per worker and shared.
int64_t attention_worker_bytes(const Plan& plan, const AttentionOp& op);
int64_t attention_partials_bytes(const Plan& plan, const AttentionOp& op);

}  // namespace helm::cpu
