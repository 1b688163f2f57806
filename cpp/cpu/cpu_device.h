// The CPU as a device: its addresses are pointers, and a stream does its work at once, in the
// calling thread and the pool.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "cpu/integer_isa.h"
#include "cpu/kernels/kernels.h"
#include "cpu/op_times.h"
#include "device/device.h"

namespace helm::cpu {

class CpuDevice final : public Device {
 public:
  // All must outlive the device; `times` counts those of its stages and may be null. A stage takes
  // at least stage_bytes() / paced_bytes_per_s; 0: as long as it does. node_cost: see there.
  CpuDevice(const KernelTable& kernels, ThreadPool& threads, OpTimes* times = nullptr,
            const IntegerTable& integers = select_integer_kernels(), double paced_bytes_per_s = 0,
            double node_cost = 1)
      : kernels_(kernels),
        threads_(threads),
        times_(times),
        integers_(integers),
        paced_bytes_per_s_(paced_bytes_per_s),
        node_cost_(node_cost) {}

  DeviceInfo describe() const override;
  DeviceAddress allocate(int64_t bytes, const char* purpose) override;
  void release(DeviceAddress address) override;
  std::byte* allocate_host(int64_t bytes, const char* purpose) override;
  void release_host(std::byte* memory) override;
  std::vector<std::span<const std::byte>> lazy_memory() const override;
  bool pin(const void*, int64_t, bool) override { return true; }  // copies are the CPU's own
  void unpin(const void*) override {}
  std::unique_ptr<Stream> create_stream() override;
  std::unique_ptr<Event> create_event() override;
  bool takes(const Format& format) const override;
  int64_t workspace_bytes(const Plan& plan, std::span<const UnitSpec> units) const override;
  std::unique_ptr<Stage> compile(const StageSpec& spec) override;

 private:
  const KernelTable& kernels_;
  ThreadPool& threads_;
  OpTimes* times_;
  const IntegerTable& integers_;
  double paced_bytes_per_s_, node_cost_;
  std::map<const std::byte*, Arena> arenas_;  // by address
};

}  // namespace helm::cpu
