// A simulated accelerator made of host memory, for machines without one and for trying a smaller
// one: capped memory behind addresses that host code cannot dereference, streams that are threads,
// copies at the speed of a given link. Stages run the CPU's kernels, so results are the CPU's, in
// no less time than memory of a given rate would take.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "cpu/kernels/kernels.h"
#include "device/device.h"
#include "device/lane_clock.h"

namespace helm {

struct SimOptions {
  int64_t memory_bytes = int64_t{1} << 60;
  double link_bytes_per_s = 0;  // in each direction, of all streams together; 0: as fast as memory
  double latency_s = 0;         // of every copy, while which its direction does nothing else
  // A stage takes at least stage_bytes() / rate; 0: as long as it takes here.
  double memory_bytes_per_s = 0;
  int threads = 1;  // that compute stages
  // Faults, for tests. Commands of streams begin up to `jitter_s` late, each by another time; the
  // allocation of this number, counted from 1, is refused, and the device is lost at the command of
  // this number; 0: none.
  double jitter_s = 0;
  int64_t refused_allocation = 0;
  int64_t lost_at_command = 0;
};

class SimDevice final : public Device {
 public:
  SimDevice(const SimOptions& options, const cpu::KernelTable& kernels);
  ~SimDevice() override;

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

  const SimOptions& options() const { return options_; }
  // Nothing but its threads takes time.
  bool as_fast_as_host() const {
    return options_.link_bytes_per_s <= 0 && options_.latency_s <= 0 &&
           options_.memory_bytes_per_s <= 0;
  }
  // The memory behind an address; throws Error{kInvalid} unless `bytes` from there are allocated.
  std::byte* translate(DeviceAddress address, int64_t bytes) const;
  // Throws Error{kDevice} from the command on at which the device is lost.
  void begin_command();
  // Stages of all streams take turns.
  std::mutex& compute_mutex() { return compute_mutex_; }
  // What streams share: either direction of the link, and what computes stages.
  LaneClock& up() { return up_; }
  LaneClock& down() { return down_; }
  LaneClock& compute() { return compute_; }

 private:
  const SimOptions options_;
  const cpu::KernelTable& kernels_;
  ThreadPool threads_;
  std::mutex compute_mutex_;
  LaneClock up_, down_, compute_;
  std::atomic<int64_t> commands_ = 0;
  std::atomic<uint32_t> streams_ = 0;  // created so far

  void begin_allocation(int64_t bytes, const char* purpose);

  struct Block {
    Arena memory;
    int64_t bytes;
  };

  mutable std::mutex mutex_;  // of what follows
  std::map<uintptr_t, Block> blocks_;
  std::map<const std::byte*, Arena> host_blocks_;
  int64_t used_bytes_ = 0;
  int64_t allocations_ = 0;
  uintptr_t next_;
};

}  // namespace helm
