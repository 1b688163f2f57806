// What the emulated device says of itself, its errors and its faults.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace cuda_emulation {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

const ErrorText& text_of(cudaError_t error) {
  static constexpr ErrorText kUnknown = {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};
  const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                   [&](const ErrorText& e) { return e.error == error; });
  return found == std::end(kErrors) ? kUnknown : *found;
}

}  // namespace

State& state() {
  static State* const the_state = [] {
    auto* s = new State;  // streams outlive statics
    if (const char* bytes = std::getenv("CUDA_EMULATION_BYTES")) {
      s->total_bytes = std::strtoull(bytes, nullptr, 10);
    }
    if (const char* compute = std::getenv("CUDA_EMULATION_COMPUTE")) {
      const int number = std::atoi(compute);
      s->major = number / 10, s->minor = number % 10;
    }
    return s;
  }();
  return *the_state;
}

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t sticky() {
  std::lock_guard lock(state().mutex);
  return state().sticky;
}

void set_device_count(int count) {
  std::lock_guard lock(state().mutex);
  state().devices = count;
}

void set_compute_capability(int major, int minor) {
  std::lock_guard lock(state().mutex);
  state().major = major, state().minor = minor;
}

int compute_capability() {
  std::lock_guard lock(state().mutex);
  return state().major * 10 + state().minor;
}

void refuse_captures(bool refuse) {
  std::lock_guard lock(state().mutex);
  state().refuse_captures = refuse;
}

void lock_for_reading(bool can) {
  std::lock_guard lock(state().mutex);
  state().locks_for_reading = can;
}

int64_t launches() {
  std::lock_guard lock(state().mutex);
  return state().launches;
}

int64_t overlapping_launches() {
  std::lock_guard lock(state().mutex);
  return state().overlapping_launches;
}

int64_t uploads() {
  std::lock_guard lock(state().mutex);
  return state().uploads;
}

int64_t pageable_copies() {
  std::lock_guard lock(state().mutex);
  return state().pageable_copies;
}

std::string fault() {
  std::lock_guard lock(state().mutex);
  return state().fault;
}

void clear_fault() {
  drain();
  std::lock_guard lock(state().mutex);
  state().fault.clear();
  state().sticky = cudaSuccess;
  last_error = cudaSuccess;
}

void report_fault(const std::string& message) {
  std::lock_guard lock(state().mutex);
  if (state().sticky != cudaSuccess) return;
  std::fprintf(stderr, "[cuda emulation] %s\n", message.c_str());
  state().fault = message;
  state().sticky = cudaErrorLaunchFailure;
}

cudaError_t allow_shared_bytes(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMostSharedBytes) {
    return failed(cudaErrorInvalidValue);
  }
  std::lock_guard lock(state().mutex);
  state().shared_bytes[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t describe_kernel(cudaFuncAttributes* attributes) {
  std::lock_guard lock(state().mutex);
  attributes->ptxVersion = attributes->binaryVersion = state().major * 10 + state().minor;
  return cudaSuccess;
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaGetDeviceCount(int* count) {
  std::lock_guard lock(state().mutex);
  *count = state().devices;
  return *count == 0 ? failed(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  std::lock_guard lock(state().mutex);
  return device >= 0 && device < state().devices ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (const cudaError_t error = cudaSetDevice(device)) return error;
  *p = {};
  std::strcpy(p->name, "Emulated device");
  std::memcpy(p->uuid.bytes, "emulated-device", 16);
  std::lock_guard lock(state().mutex);
  p->totalGlobalMem = state().total_bytes;
  p->sharedMemPerBlock = kDefaultSharedBytes;
  p->sharedMemPerBlockOptin = kMostSharedBytes;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 1024;
  p->major = state().major;
  p->minor = state().minor;
  p->multiProcessorCount = 40;
  p->memoryBusWidth = 128;
  p->l2CacheSize = 1 << 20;
  p->asyncEngineCount = 2;
  p->hostRegisterReadOnlySupported = state().locks_for_reading;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrIntegrated:
      *value = p.integrated;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 1'000'000;  // kHz
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = p.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = p.asyncEngineCount;
      break;
    case cudaDevAttrHostRegisterReadOnlySupported:
      *value = p.hostRegisterReadOnlySupported;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error != cudaSuccess ? error : sticky();
}

cudaError_t cudaPeekAtLastError() {
  return last_error != cudaSuccess ? last_error : sticky();
}

const char* cudaGetErrorString(cudaError_t error) {
  return text_of(error).text;
}

const char* cudaGetErrorName(cudaError_t error) {
  return text_of(error).name;
}
