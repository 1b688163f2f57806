// A stage on the CPU: a run of units compiled once into a static program over bound buffers.
// Nothing is allocated, looked up or decided per token beyond the shape of the step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/first_reads.h"
#include "cpu/integer_isa.h"
#include "cpu/kernels/kernels.h"
#include "cpu/key_bias.h"
#include "cpu/kv_page.h"
#include "cpu/matrix.h"
#include "cpu/op_times.h"
#include "device/device.h"
#include "helm/plan.h"

namespace helm::cpu {

// One op with its buffers bound. Called by every member of the team, which meets afterwards.
class BoundOp {
 public:
  virtual ~BoundOp() = default;
  virtual void run(const StepView& step, Team& team) const = 0;
  // Adds what the calling member reads first of what was in memory before the step.
  virtual void first_reads(const StepView&, const Team&, FirstReads&) const {}
  // No product is between this and `op`, whose first reads may be asked for meanwhile.
  virtual void set_next(const BoundOp& /*op*/) {}
};

inline int64_t step_rows(const StepView& step, bool per_output) {
  return per_output ? step.outputs() : step.tokens();
}

// An address of the CPU device, or one that another device of host memory has translated.
template <typename T = std::byte>
T* host_pointer(DeviceAddress address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline DeviceAddress device_address(const void* memory) {
  return static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(memory));
}

// Buffers that ops are bound to.
struct Bindings {
  const Plan& plan;
  std::vector<Weight> weights;    // by TensorIndex
  std::vector<DeviceAddress> kv;  // by KV entry
  const KernelTable& kernels;
  const IntegerTable& integers;
  std::vector<float*> values;       // by ValueIndex, [rows, width]
  std::vector<float*> cosines;      // by rope table, [step_tokens, rotary / 2], filled per step
  std::vector<float*> sines;        // likewise
  std::vector<std::byte*> scratch;  // by worker
  std::vector<Turns> turns;         // by rope table, where keys lack their bias
  std::byte* packed = nullptr;      // shared by the members, the input of a product, packed
  std::byte* partials = nullptr;    // shared by the members, attention_partials_bytes()
  ExpertCounts* experts = nullptr;  // or null

  Format format(TensorIndex tensor) const { return weights[static_cast<size_t>(tensor)].format; }
  std::unique_ptr<Matrix> matrix(TensorIndex tensor) const;
  KvPages pages(int64_t entry) const;
  const float* vector(TensorIndex tensor) const {  // [size], null for kNoTensor
    if (tensor == kNoTensor) return nullptr;
    return host_pointer<const float>(weights[static_cast<size_t>(tensor)].address);
  }
  float* value(ValueIndex index) const { return values[static_cast<size_t>(index)]; }
  int64_t width(ValueIndex index) const { return plan.values[static_cast<size_t>(index)].width; }
  bool per_output(ValueIndex index) const {
    return plan.values[static_cast<size_t>(index)].per_output;
  }
};

class CpuStage final : public Stage {
 public:
  // The addresses of `spec` are host pointers; they, the plan and the threads must outlive the
  // stage. `times` may be null.
  CpuStage(const StageSpec& spec, const KernelTable& kernels, ThreadPool& threads,
           OpTimes* times = nullptr, const IntegerTable& integers = select_integer_kernels());
  ~CpuStage() override;
  CpuStage(const CpuStage&) = delete;  // ops refer to the bindings
  CpuStage& operator=(const CpuStage&) = delete;

  // Per-thread scratch, attention partials and rotary tables of a stage of these units.
  static int64_t workspace_bytes(const Plan& plan, std::span<const UnitSpec> units,
                                 const KernelTable& kernels, int threads);

  void run(Stream&, const StepView& step) override { run(step); }
  void run(const StepView& step);  // returns when it is done

 private:
  void bind_workspace(const StageSpec& spec);
  void fill_rope_tables(const StepView& step, Team& team) const;
  void run_timed(const StepView& step, Team& team) const;

  const Plan& plan_;
  ThreadPool& threads_;
  Bindings bindings_;
  OpTimes* times_;
  bool rotates_ = false;
  std::vector<std::unique_ptr<BoundOp>> ops_;
  std::vector<OpKind> kinds_;  // of the ops
};

// Binds one op of the plan (cpp/cpu/ops.cc, attention.cc, experts.cc).
std::unique_ptr<BoundOp> bind_op(const Op& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const AttentionOp& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const AppendOp& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const ResetOp& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const AttendOp& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_attention(const MergeOp& op, const Bindings& bindings);

std::unique_ptr<BoundOp> bind_mixture(const RouteOp& op, const Bindings& bindings);
std::unique_ptr<BoundOp> bind_mixture(const ExpertsOp& op, const Bindings& bindings);

// Sizes of the attention's working memory: per worker and shared.
int64_t attention_worker_bytes(int64_t heads, int64_t kv_heads, int64_t head_dim);
int64_t attention_partials_bytes(const Plan& plan, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim);

}  // namespace helm::cpu
