// Device memory between guards, page-locked host memory, and what a copy may touch.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

#include "state.h"
#include "stream.h"

namespace cuda_emulation {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr unsigned char kGuard = 0xa5, kUndefined = 0xff;

unsigned char* map_guarded(Ranges* ranges, size_t bytes) {
  auto* mapped = static_cast<unsigned char*>(operator new(
      bytes + 2 * kGuardBytes, std::align_val_t{kGuardBytes}, std::nothrow));
  if (mapped == nullptr) return nullptr;
  std::memset(mapped, kGuard, kGuardBytes);
  std::memset(mapped + kGuardBytes, kUndefined, bytes);
  std::memset(mapped + kGuardBytes + bytes, kGuard, kGuardBytes);
  (*ranges)[mapped + kGuardBytes] = {bytes, mapped};
  return mapped + kGuardBytes;
}

bool guards_intact(const unsigned char* p, size_t bytes) {
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (p[-1 - static_cast<ptrdiff_t>(i)] != kGuard || p[bytes + i] != kGuard) return false;
  }
  return true;
}

// The range that holds all of [p, p + bytes), or null. Touched is set if any of it lies in one.
const Range* find(const Ranges& ranges, const void* pointer, size_t bytes, bool* touched) {
  const auto* p = static_cast<const unsigned char*>(pointer);
  auto after = ranges.upper_bound(p);
  *touched = after != ranges.end() && after->first < p + bytes;
  if (after == ranges.begin()) return nullptr;
  const auto& [base, range] = *--after;
  *touched = *touched || p < base + range.bytes;
  return p + bytes <= base + range.bytes ? &range : nullptr;
}

cudaError_t release(Ranges* ranges, void* pointer) {
  drain();
  bool overrun = false;
  {
    std::lock_guard lock(state().mutex);
    const auto found = ranges->find(static_cast<unsigned char*>(pointer));
    if (found == ranges->end() || found->second.mapped == nullptr) {
      return failed(cudaErrorInvalidValue);
    }
    overrun = !guards_intact(found->first, found->second.bytes);
    if (ranges == &state().device) state().used_bytes -= found->second.bytes;
    operator delete(found->second.mapped, std::align_val_t{kGuardBytes});
    ranges->erase(found);
  }
  if (overrun) report_fault("a write outside an allocation, found when it was freed");
  return cudaSuccess;
}

// Whether the process may write to all of [p, p + bytes).
bool writable(const void* p, size_t bytes) {
  auto next = reinterpret_cast<uintptr_t>(p);
  const uintptr_t last = next + bytes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; next < last && std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char access[5] = "";
    std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, access);
    if (next >= end) continue;
    if (next < begin || access[1] != 'w') return false;
    next = end;
  }
  return next >= last;
}

enum class Place { kDevice, kPinned, kPinnedForReading, kPageable, kBroken };

Place place_of(const void* p, size_t bytes) {
  bool on_device = false, pinned = false;
  if (find(state().device, p, bytes, &on_device)) return Place::kDevice;
  if (on_device) return Place::kBroken;
  const Range* const range = find(state().pinned, p, bytes, &pinned);
  if (range == nullptr) return Place::kPageable;
  return range->read_only ? Place::kPinnedForReading : Place::kPinned;
}

// Success if both ends are where `kind` says. Pageable memory is copied before the call returns.
cudaError_t check_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                       bool* pageable) {
  std::lock_guard lock(state().mutex);
  const Place a = place_of(to, bytes), b = place_of(from, bytes);
  if (a == Place::kBroken || b == Place::kBroken) return cudaErrorInvalidValue;
  if (a == Place::kPinnedForReading) return cudaErrorInvalidValue;
  const bool to_device = a == Place::kDevice, from_device = b == Place::kDevice;
  if (kind != cudaMemcpyDefault) {
    const bool want_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool want_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (want_to != to_device || want_from != from_device) return cudaErrorInvalidValue;
  }
  *pageable = a == Place::kPageable || b == Place::kPageable;
  state().uploads += to_device && !from_device;
  state().pageable_copies += *pageable && to_device != from_device;
  return cudaSuccess;
}

}  // namespace

void set_memory_bytes(size_t bytes) {
  std::lock_guard lock(state().mutex);
  state().total_bytes = bytes;
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (const cudaError_t error = sticky()) return failed(error);
  std::lock_guard lock(state().mutex);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > state().total_bytes - std::min(state().total_bytes, state().used_bytes)) {
    return failed(cudaErrorMemoryAllocation);
  }
  *pointer = map_guarded(&state().device, bytes);
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation);
  state().used_bytes += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  return pointer == nullptr ? cudaSuccess : release(&state().device, pointer);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  std::lock_guard lock(state().mutex);
  *pointer = bytes == 0 ? nullptr : map_guarded(&state().pinned, bytes);
  return bytes > 0 && *pointer == nullptr ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cudaMallocHost(pointer, bytes);
}

cudaError_t cudaFreeHost(void* pointer) {
  return pointer == nullptr ? cudaSuccess : release(&state().pinned, pointer);
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  const bool read_only = (flags & cudaHostRegisterReadOnly) != 0;
  if (!read_only && !writable(pointer, bytes)) return failed(cudaErrorInvalidValue);
  std::lock_guard lock(state().mutex);
  if (read_only && !state().locks_for_reading) return failed(cudaErrorNotSupported);
  bool touched = false;
  find(state().pinned, pointer, bytes, &touched);
  if (touched) return failed(cudaErrorHostMemoryAlreadyRegistered);
  state().pinned[static_cast<unsigned char*>(pointer)] = {bytes, nullptr, read_only};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  drain();
  std::lock_guard lock(state().mutex);
  const auto found = state().pinned.find(static_cast<unsigned char*>(pointer));
  if (found == state().pinned.end() || found->second.mapped != nullptr) {
    return failed(cudaErrorHostMemoryNotRegistered);
  }
  state().pinned.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard lock(state().mutex);
  *total_bytes = state().total_bytes;
  *free_bytes = state().total_bytes - std::min(state().total_bytes, state().used_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  bool pageable = false;
  if (const cudaError_t error = check_copy(to, from, bytes, kind, &pageable)) {
    return failed(error);
  }
  enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return pageable && !capturing(stream) ? cudaStreamSynchronize(stream) : cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  {
    std::lock_guard lock(state().mutex);
    if (place_of(to, bytes) != Place::kDevice) return failed(cudaErrorInvalidValue);
  }
  enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}
