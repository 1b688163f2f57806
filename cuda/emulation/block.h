// Runs the threads of a block as fibers of one host thread and checks how they meet.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Of the fiber that runs on this host thread. One copy for all libraries of the process that hold
// kernels, at a fixed offset from the thread's pointer: kernels read them all the time.
#define HELM_EMULATED_INDEX extern constinit thread_local __attribute__((tls_model("initial-exec")))
HELM_EMULATED_INDEX uint3 threadIdx;
HELM_EMULATED_INDEX uint3 blockIdx;
HELM_EMULATED_INDEX dim3 blockDim;
HELM_EMULATED_INDEX dim3 gridDim;
#undef HELM_EMULATED_INDEX

namespace cuda_emulation {

enum class WarpOp : uint8_t { kSync, kShuffle, kBallot, kPublish };

// From inside a kernel. A barrier that not every live thread of the block reaches, an exchange that
// misses a lane of its mask or reads a lane outside it, is a fault of the launch.
void block_barrier();
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source_lane);
// Shows `count` words to all lanes of the warp, which take part, and waits for theirs. They can be
// read until this lane shows others.
inline constexpr int kMostWords = 6;
void warp_publish(const uint32_t* words, int count);
uint32_t warp_word(int lane, int word);
// Copies of 16 bytes that a thread has begun, in groups. next_copy: the first that is in no group,
// or in one of the latest `groups`, has to wait; false if all others have been handed out.
struct AsyncCopy {
  void* to;
  const void* from;
};
void begin_copy(const AsyncCopy& copy);
void commit_copies();
bool next_copy(int groups, AsyncCopy* copy);
int lane();
[[noreturn]] void kernel_fault(const char* message);
void* dynamic_shared_memory();
void await_previous();  // notes that this thread did

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void (*body)(const void* context);  // one thread
  const void* context;
  bool overlaps = false;  // a thread that ends without await_previous() is a fault
};
// Runs all blocks, one after the other. Throws std::runtime_error at a fault.
void run_grid(const Launch& launch);

}  // namespace cuda_emulation
