// The CPU as the probe of stages has it, and stages that take turns on it while they are timed.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "base/thread_clocks.h"
#include "base/thread_pool.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "helm/machine.h"
#include "probe/synthetic.h"

namespace helm::probe {

using Clock = std::chrono::steady_clock;

inline double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline constexpr double kUndisturbed = 0.9;  // share of its time that the least served thread ran

// Whoever writes first decides on which memory node a huge page lies. In an engine each member's
// rows lie on its own; here the same memory serves every shape and number of threads, so it is
// spread evenly: left in one piece, a matrix would be read from one node at one node's rate.
void fill(std::byte* to, int64_t bytes, ThreadPool& threads);

// The CPU with a number of threads.
struct Cpu {
  explicit Cpu(int threads)
      : pool(threads), device(cpu::select_kernels(), pool), account(device, int64_t{1} << 60) {}

  ThreadPool pool;
  cpu::CpuDevice device;
  Account account;
  std::unique_ptr<Stream> stream = device.create_stream();
  Fill fill_noise = [this](DeviceAddress to, int64_t bytes) {
    fill(cpu::host_pointer(to), bytes, pool);
  };
};

// Times `run`, in which all threads of the CPU take part.
template <typename Run>
void time_run(Cpu& cpu, ProbeTiming& timing, const Run& run) {
  std::vector<ThreadClocks> before(static_cast<size_t>(cpu.pool.size()));
  std::vector<ThreadClocks> after(before.size());
  cpu.pool.run(
      [&](Team& team) { before[static_cast<size_t>(team.worker())] = ThreadClocks::now(); });
  const Clock::time_point start = Clock::now();
  run();
  timing.run_s.push_back(since(start));
  cpu.pool.run(
      [&](Team& team) { after[static_cast<size_t>(team.worker())] = ThreadClocks::now(); });
  double busy = 1;
  for (size_t i = 0; i < before.size(); ++i) {
    busy =
        std::min(busy, (after[i].cpu_s - before[i].cpu_s) / (after[i].wall_s - before[i].wall_s));
  }
  if (busy >= kUndisturbed) timing.undisturbed_s.push_back(timing.run_s.back());
}

// A stage, and which timing its runs belong to.
struct Timed {
  std::shared_ptr<const Synthetic> stage;
  size_t timing;
  int64_t first_page = 0;
};

// Runs the stages in turn for `seconds`, at least one round after an unrecorded one that touches
// their buffers. If the threads never had their cores in the first, its times are all there is:
// better come back later.
void time_all(const std::vector<Timed>& stages, std::vector<ProbeTiming>& timings, Cpu& cpu,
              double seconds);

}  // namespace helm::probe
