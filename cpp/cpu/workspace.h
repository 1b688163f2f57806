// Where the parts of a CPU stage's workspace begin, in the order of the members. Stages that share
// one agree on what is filled once, which therefore comes first. Allocates and runs nothing.
#pragma once

#include <cstdint>

#include "helm/plan.h"

namespace helm::cpu {

// At least KernelTable::scratch_bytes of every isa, so that a plan does not depend on where it is
// made.
constexpr int64_t most_scratch_bytes(int64_t head_dim) {
  constexpr int64_t kPacking = int64_t{1} << 20;
  return kPacking + (head_dim == 0 ? 0 : 256 * (head_dim + 64) * int64_t{sizeof(float)});
}

class Workspace {
 public:
  // scratch_bytes(head_dim): what kernels take per member, head_dim 0: without attention. Of the
  // plan it reads values, rotary tables, limits, KV and, where keys are held without their bias,
  // all units; it must stay.
  Workspace(const Plan& plan, int64_t (*scratch_bytes)(int64_t head_dim));

  // What a stage with this unit, with attention to such heads, needs as well.
  void add(const UnitSpec& unit);
  void attend(int64_t heads, int64_t kv_heads, int64_t head_dim);

  bool rotates() const { return rope_bytes > 0; }
  int64_t bytes(int threads) const {
    return turn_bytes + threads * worker_bytes + packed_bytes + partials_bytes + rope_bytes;
  }

  int64_t turn_bytes = 0;
  int64_t worker_bytes = 0;  // of each member; members never share a page
  int64_t packed_bytes = 0;
  int64_t partials_bytes = 0;
  int64_t rope_bytes = 0;  // cosines and sines of all tables

 private:
  void add_linear(const LinearOp& op);
  void add_experts(const ExpertsOp& op);
  void add_worker(int64_t bytes);

  const Plan& plan_;
  int64_t (*scratch_bytes_)(int64_t head_dim);
};

// Cosines, or sines, of one rotary table for a step.
int64_t rope_table_bytes(const Plan& plan, const RopeTable& table);

}  // namespace helm::cpu
