// What tests ask of the emulated device beyond the CUDA API.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cuda_emulation {

// Caps the device memory, as the environment variable CUDA_EMULATION_BYTES does; 1 GiB at first.
void set_memory_bytes(size_t bytes);
// Devices that cudaGetDeviceCount reports: 0 or 1; 1 at first.
void set_device_count(int count);

// What the device says of its generation, as the environment variable CUDA_EMULATION_COMPUTE ("90")
// does: 8.0, 9.0, 12.0; 7.5 at first. Limits stay those of 7.5, the least.
void set_compute_capability(int major, int minor);
int compute_capability();  // times ten
// Whether captures fail at their end, as those of an operation that a graph cannot hold.
void refuse_captures(bool refuse);
// Whether memory can be page-locked for reading alone, as cudaDevAttrHostRegisterReadOnlySupported
// says; at first it can.
void lock_for_reading(bool can);
// Kernels enqueued so far, captured ones too, replayed ones not.
int64_t launches();
int64_t overlapping_launches();  // those of them that may begin before the kernel before has ended
// Copies between host and device so far: to the device, and in either direction from or to host
// memory that is not page-locked.
int64_t uploads();
int64_t pageable_copies();

// The first fault of a kernel or of a guard (deadlock, misaligned load, overrun, ...), or empty.
// As on a GPU it is sticky: all later work is skipped and every synchronisation fails.
std::string fault();
// Forgets the fault and the last error, as a new process would.
void clear_fault();
// Reports a fault; the first one is kept and printed.
void report_fault(const std::string& message);

}  // namespace cuda_emulation
