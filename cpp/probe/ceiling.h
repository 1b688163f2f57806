// The two ceilings a kernel is measured against: streaming reads of memory and FMA rate.
// Knows nothing of models, plans or the engine's thread pool.
#pragma once

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace helm::probe {

// Small: of 4 KiB on most machines, as files have them.
enum class Pages : uint8_t { kHuge, kSmall };

// Memory on huge pages where the system gives them, or on small ones, touched. Throws
// Error{kMemory} if refused.
class Buffer {
 public:
  explicit Buffer(int64_t bytes, Pages pages = Pages::kHuge);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_;
  int64_t bytes_;
};

// Both throw Error{kInvalid} for fewer threads than one or, to read, less than 4 KiB for each, and
// Error{kMemory} where the system refuses a thread.

// Bytes per second that `threads` read together from `buffer`, each its own part, in the fastest of
// KernelTable::probe_read's ways: the median pass of those that fit in its share of `seconds` (at
// least one), because the bandwidth of a shared machine comes in bursts that no longer run sees.
double stream_read_bytes_per_s(int threads, const Buffer& buffer, double seconds,
                               const cpu::KernelTable* table = nullptr);
double stream_read_bytes_per_s(int threads, int64_t bytes = int64_t{1} << 30, double seconds = 0.5);

// f32 operations per second of `threads` doing FMAs in registers, in the given tier or the best
// one: the best of the slices that fit in `seconds`.
double fma_flops(int threads, double seconds = 0.2, const cpu::KernelTable* table = nullptr);

}  // namespace helm::probe
