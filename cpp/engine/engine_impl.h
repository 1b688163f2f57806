// What an engine is made of. Implemented in engine.cc (loading, statistics, the public calls),
// sequences.cc and steps.cc.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/process.h"
#include "base/thread_pool.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "cpu/op_times.h"
#include "device/memory.h"
#include "engine/team_size.h"
#include "helm/engine.h"
#include "kv/cache.h"
#include "program/executor.h"
#include "weights/store.h"

namespace helm {

class Engine::Impl {
 public:
  Impl(Plan plan, const EngineOptions& options);

  const Plan& plan() const { return plan_; }
  bool here() const { return process_.here(); }
  void check_process() const {
    process_.check("[engine] this model was loaded",
                   "load it in the child, or start children with the spawn method");
  }
  EngineStats stats() const;
  std::vector<std::span<const std::byte>> lazy_memory() const;
  void count_op_times(bool on) { op_times_.count(on); }
  bool can_open(int64_t capacity, int64_t spare, const HeldPrefix& prefix,
                std::span<const HeldBlock> without) const;
  SequenceId open(int64_t capacity, const HeldPrefix& prefix);
  SequenceId fork(SequenceId source, int64_t length, int64_t capacity);
  std::vector<HeldBlock> blocks(SequenceId id, int64_t length) const;
  std::vector<HeldBlock> detach(SequenceId id, int64_t length);
  void release(std::span<const HeldBlock> held);
  int64_t usable(std::span<const HeldBlock> blocks, int64_t length) const {
    return kv_.usable(checked(blocks), length);
  }
  std::vector<HeldBlock> blocks_to_save(SequenceId id, int64_t tokens) const;
  void save(std::span<const HeldBlock> blocks, std::span<const int32_t> tokens,
            const std::string& path, const std::string& metadata, const Progress& progress);
  LoadedSequence load(const std::string& path, int64_t capacity, const Progress& progress);
  void close(SequenceId id);
  int64_t length(SequenceId id) const { return sequence(id).length; }
  int64_t capacity(SequenceId id) const { return sequence(id).capacity; }
  void resize(SequenceId id, int64_t length, int64_t capacity);
  bool can_resize(SequenceId id, int64_t length, int64_t capacity) const;
  bool grow(SequenceId id, int64_t capacity);
  bool continues(SequenceId id, int64_t length) const {
    return kv_.continues(sequence(id), length);
  }
  int64_t steps_ahead() const { return executor_.limit(); }
  FarUse far_use() const { return executor_.far_use(); }
  ExpertsUse experts_use() const {
    const cpu::ExpertCounts& own = op_times_.experts;
    return {own.runs, own.rows, own.distinct, own.expected};
  }
  int64_t move(SequenceId id, KvSide side);
  bool can_move(SequenceId id, KvSide side) const;
  KvSide side(SequenceId id) const { return sequence(id).far ? KvSide::kFar : KvSide::kNear; }
  bool moves() const { return kv_.overflows() && cpu_attends_far(); }
  int64_t near_room() const { return executor_.near_room(); }
  int64_t near_most() const { return executor_.near_most(); }
  int64_t far_room() const { return kv_.far().free(); }
  int64_t near_blocks(SequenceId id) const { return kv_.near_blocks(sequence(id)); }
  std::vector<int32_t> near_ones(std::span<const HeldBlock> held) const;
  void leave(std::span<const HeldBlock> held);
  bool can_leave(std::span<const HeldBlock> held) const;
  int64_t near_wanted(SequenceId id, int64_t tokens) const;
  int64_t far_wanted(SequenceId id, int64_t tokens) const;
  int64_t in_flight() const { return executor_.in_flight(); }
  std::span<const float> step(std::span<const StepInput> inputs);
  bool splits() const { return executor_.splits(); }
  void submit(std::span<const StepInput> inputs, size_t second = 0);
  std::span<const float> collect();
  void share(int64_t count, const std::function<void(int64_t, int)>& work);

 private:
  const KvSequence& sequence(SequenceId id) const;
  KvSequence& sequence(SequenceId id) {
    return const_cast<KvSequence&>(static_cast<const Impl*>(this)->sequence(id));
  }
  std::span<const HeldBlock> checked(std::span<const HeldBlock> blocks) const;
  int64_t windows_to_open(const HeldPrefix& prefix) const;
  void check_open(int64_t capacity, const HeldPrefix& prefix) const;
  void check_continues(SequenceId id, const KvSequence& sequence, int64_t length) const;
  void check(std::span<const StepInput> inputs) const;
  void check_second(std::span<const StepInput> inputs) const;
  void check_tokens(const StepInput& input) const;
  void make_room(std::span<const StepInput> inputs);
  void copy_own(KvSequence& target, size_t b, int64_t positions);
  bool cpu_attends_far() const { return plan_.schedule.overflow == Schedule::Overflow::kCpu; }
  bool on_cpu(const StepInput& input) const;
  void gather(std::span<const StepInput> inputs, StepRows& rows);
  void take_spent();
  void size_team(std::span<const StepInput> inputs);
  void check_pools() const;
  std::vector<Account*> accounts() {  // by device
    if (accelerator_account_ == nullptr) return {&cpu_account_};
    return {&cpu_account_, accelerator_account_.get()};
  }
  DeviceUse use_of(DeviceIndex device) const;
  const std::string& weights_digest();

  Process process_;
  Plan plan_;
  const cpu::KernelTable& kernels_;
  ThreadPool threads_;
  TeamSize team_size_;            // of decode steps
  bool decoded_ = false;          // in the step before
  ThreadPool::Spent step_spent_;  // in that step, as far as it was taken
  std::chrono::steady_clock::time_point start_;
  cpu::OpTimes op_times_;
  cpu::CpuDevice cpu_;
  Account cpu_account_;
  std::unique_ptr<Device> accelerator_;  // null for a plan without one
  std::unique_ptr<Account> accelerator_account_;
  Weights weights_;
  KvCache kv_;
  Executor executor_;
  double load_s_;

  std::map<SequenceId, KvSequence> sequences_;
  SequenceId next_id_ = 0;
  std::string weights_digest_;  // made when first asked for
};

}  // namespace helm
