// What tests ask of the emulated device beyond the CUDA API.
#pragma once

#include <cstddef>
#include <string>

namespace cuda_emulation {

// Caps the device memory, as the environment variable CUDA_EMULATION_BYTES does; 1 GiB at first.
void set_memory_bytes(size_t bytes);
// Devices that cudaGetDeviceCount reports: 0 or 1; 1 at first.
void set_device_count(int count);

// The first fault of a kernel or of a guard (deadlock, misaligned load, overrun, ...), or empty.
// As on a GPU it is sticky: all later work is skipped and every synchronisation fails.
std::string fault();
// Forgets the fault and the last error, as a new process would.
void clear_fault();
// Reports a fault; the first one is kept and printed.
void report_fault(const std::string& message);

}  // namespace cuda_emulation
