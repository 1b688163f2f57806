// Work in order: one thread per stream.
#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace cuda_emulation {

using Work = std::function<void()>;

// Runs the work on the stream's thread, or records it while the stream is being captured. Work
// that throws std::exception, and all work after it, counts as a fault.
void enqueue(cudaStream_t stream, Work work);
bool capturing(cudaStream_t stream);

}  // namespace cuda_emulation
