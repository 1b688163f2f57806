// Runs the tier's probe loops on plain threads that start together.
#include "probe/ceiling.h"

#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "cpu/isa.h"

namespace helm::probe {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs body(thread) on all threads at once, again and again for `seconds`; returns how long each
// pass took, shortest first.
std::vector<double> passes_s(int threads, double seconds, const std::function<void(int)>& body) {
  std::barrier start(threads), end(threads);
  bool more = true;
  std::vector<double> passes;
  const auto loop = [&](int thread) {
    const Clock::time_point begin = Clock::now();
    for (;;) {
      start.arrive_and_wait();
      if (!more) return;
      const Clock::time_point pass = Clock::now();
      body(thread);
      end.arrive_and_wait();
      if (thread != 0) continue;
      passes.push_back(seconds_since(pass));
      more = seconds_since(begin) < seconds;
    }
  };
  std::vector<std::jthread> others;
  for (int t = 1; t < threads; ++t) {
    try {
      others.emplace_back(loop, t);
    } catch (const std::system_error& error) {
      more = false;
      (void)start.arrive(threads - t + 1);  // for those that are missing and this one
      fail_to_start(t, threads, error);
    }
  }
  loop(0);
  std::sort(passes.begin(), passes.end());
  return passes;
}

void check_threads(int threads) {
  if (threads >= 1) return;
  fail(ErrorKind::kInvalid, "[probe] ", threads, " threads were asked for; expected 1 or more");
}

const cpu::KernelTable& table_or_best(const cpu::KernelTable* table) {
  return table ? *table : cpu::select_kernels();
}

}  // namespace

Buffer::Buffer(int64_t bytes, Pages pages) : bytes_(bytes) {
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    throw Error(ErrorKind::kMemory, "[probe] cannot allocate " + std::to_string(bytes >> 20) +
                                        " MiB; free memory or probe a smaller buffer");
  }
#ifdef MADV_HUGEPAGE
  madvise(p, static_cast<size_t>(bytes), pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  std::memset(p, 0, static_cast<size_t>(bytes));
  data_ = static_cast<char*>(p);
}

Buffer::~Buffer() {
  munmap(data_, static_cast<size_t>(bytes_));
}

double stream_read_bytes_per_s(int threads, const Buffer& buffer, double seconds,
                               const cpu::KernelTable* table) {
  check_threads(threads);
  const cpu::KernelTable& kernels = table_or_best(table);
  const int64_t part = buffer.bytes() / threads / 4096 * 4096;
  if (part == 0) {
    fail(ErrorKind::kInvalid, "[probe] ", threads, " threads cannot read ", buffer.bytes(),
         " bytes; expected 4096 or more for each");
  }
  std::vector<float> sinks(static_cast<size_t>(threads) * 16);  // one cache line each
  double best = 0;
  for (const auto read : kernels.probe_read) {
    const std::vector<double> passes = passes_s(threads, seconds / cpu::kReadProbes, [&](int t) {
      read(buffer.data() + t * part, part, &sinks[static_cast<size_t>(t) * 16]);
    });
    best = std::max(best, static_cast<double>(part * threads) / passes[passes.size() / 2]);
  }
  return best;
}

double stream_read_bytes_per_s(int threads, int64_t bytes, double seconds) {
  check_threads(threads);
  const Buffer buffer(bytes);
  return stream_read_bytes_per_s(threads, buffer, seconds);
}

double fma_flops(int threads, double seconds, const cpu::KernelTable* table) {
  check_threads(threads);
  const cpu::KernelTable& kernels = table_or_best(table);
  constexpr int64_t kRounds = 50000;  // a few milliseconds: long against the barrier
  std::vector<float> sinks(static_cast<size_t>(threads) * 16, 0.5f);
  std::vector<double> flops(static_cast<size_t>(threads));
  const std::vector<double> passes = passes_s(threads, seconds, [&](int t) {
    float sink = 0.5f;
    flops[static_cast<size_t>(t)] = kernels.probe_fma(kRounds, &sink);
    sinks[static_cast<size_t>(t) * 16] = sink;
  });
  double total = 0;
  for (double f : flops) total += f;
  return total / passes.front();
}

}  // namespace helm::probe
