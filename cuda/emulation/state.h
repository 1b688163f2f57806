// The one emulated device: what the pieces of the runtime share.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace cuda_emulation {

struct Range {
  size_t bytes;
  unsigned char* mapped;   // with guards; null for registered memory
  bool read_only = false;  // the device may not write there
};
using Ranges = std::map<const unsigned char*, Range>;

struct State {
  std::mutex mutex;
  int devices = 1;
  int major = 7, minor = 5;
  bool refuse_captures = false;
  bool locks_for_reading = true;
  int64_t launches = 0, overlapping_launches = 0, uploads = 0, pageable_copies = 0;
  size_t total_bytes = size_t{1} << 30;
  size_t used_bytes = 0;
  Ranges device, pinned;
  std::map<const void*, int> shared_bytes;  // that a kernel may use, by cudaFuncSetAttribute
  std::string fault;
  cudaError_t sticky = cudaSuccess;
};
State& state();

inline constexpr size_t kDefaultSharedBytes = 48 << 10;
inline constexpr size_t kMostSharedBytes = 64 << 10;  // of sm_75, the least that is supported

// Keeps an error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t error);
// The sticky error of a fault, or success.
cudaError_t sticky();

// Waits for all work of all streams.
void drain();

}  // namespace cuda_emulation
