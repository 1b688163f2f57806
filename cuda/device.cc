#include "cuda/device.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/arena.h"
#include "base/check.h"
#include "cuda/check.h"
#include "cuda/stage.h"
#include "cuda/step_tables.h"
#include "cuda/workspace.h"
#include "device/formats.h"

namespace helm::cuda {
namespace {

// The oldest architecture whose code the kernels are written for (Turing).
constexpr int kOldestCompute = 75;

void* pointer(DeviceAddress address) {
  return reinterpret_cast<void*>(address);
}

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, ordinal), "reading a device attribute");
  return value;
}

}  // namespace

void use_gpu(int ordinal) {
  check(cudaSetDevice(ordinal), "choosing the GPU");
}

PinnedMemory::PinnedMemory(int64_t bytes, const char* purpose) {
  void* memory = nullptr;
  const cudaError_t status = cudaHostAlloc(
      &memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)), cudaHostAllocPortable);
  if (status != cudaSuccess) {
    cudaGetLastError();  // taken note of
    fail(ErrorKind::kMemory, "[cuda] ", size_text(bytes), " of page-locked host memory for ",
         purpose, " were refused: ", cudaGetErrorString(status),
         "; close other programs, or raise the limit on locked memory (ulimit -l)");
  }
  data_ = static_cast<std::byte*>(memory);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

std::byte* PinnedMemory::release() {
  return std::exchange(data_, nullptr);
}

CudaEvent::CudaEvent(int ordinal) : ordinal_(ordinal) {
  use_gpu(ordinal_);
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
}

CudaEvent::~CudaEvent() {
  cudaSetDevice(ordinal_);
  cudaEventDestroy(event_);
}

void CudaEvent::synchronize() {
  use_gpu(ordinal_);
  check(cudaEventSynchronize(event_), "work before an event");
}

CudaStream::CudaStream(int ordinal) : ordinal_(ordinal) {
  use_gpu(ordinal_);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

CudaStream::~CudaStream() {
  cudaSetDevice(ordinal_);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

void CudaStream::upload(DeviceAddress to, const void* from, int64_t bytes) {
  use_gpu(ordinal_);
  check(cudaMemcpyAsync(pointer(to), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                        stream_),
        "copying to the GPU");
}

void CudaStream::download(void* to, DeviceAddress from, int64_t bytes) {
  use_gpu(ordinal_);
  check(cudaMemcpyAsync(to, pointer(from), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                        stream_),
        "copying from the GPU");
}

void CudaStream::record(Event& event) {
  use_gpu(ordinal_);
  check(cudaEventRecord(static_cast<CudaEvent&>(event).handle(), stream_), "recording an event");
}

void CudaStream::wait(Event& event) {
  use_gpu(ordinal_);
  check(cudaStreamWaitEvent(stream_, static_cast<CudaEvent&>(event).handle(), 0),
        "making a stream wait");
}

void CudaStream::synchronize() {
  use_gpu(ordinal_);
  check(cudaStreamSynchronize(stream_), "work on a stream");
}

CudaDevice::CudaDevice(const DeviceOptions& options, const BlasApi& blas) : options_(options) {
  use_gpu(options_.ordinal);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, options_.ordinal), "reading the GPU's properties");
  name_ = properties.name;
  memory_bytes_ = static_cast<int64_t>(properties.totalGlobalMem);
  locks_mapped_ = attribute(cudaDevAttrHostRegisterReadOnlySupported, options_.ordinal) != 0;
  compute_ = attribute(cudaDevAttrComputeCapabilityMajor, options_.ordinal) * 10 +
             attribute(cudaDevAttrComputeCapabilityMinor, options_.ordinal);
  if (compute_ < kOldestCompute) {
    fail(ErrorKind::kDevice, "[cuda] ", name_, " has compute capability ", compute_ / 10, ".",
         compute_ % 10, "; HELM needs ", kOldestCompute / 10, ".", kOldestCompute % 10,
         " or newer");
  }
  multiprocessors_ = attribute(cudaDevAttrMultiProcessorCount, options_.ordinal);
  options_.overlap = options_.overlap && kernels_await_previous();
  blas_ = std::make_shared<Blas>(blas, options_.ordinal);
}

CudaDevice::~CudaDevice() {
  cudaSetDevice(options_.ordinal);
  for (const auto& [address, bytes] : allocations_) cudaFree(pointer(address));
}

int64_t CudaDevice::free_bytes() const {
  size_t free = 0;
  size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "reading the GPU's free memory");
  const auto left = static_cast<int64_t>(free);
  if (options_.limit_bytes == 0) return left;
  return std::min(left, options_.limit_bytes - allocated_bytes_);
}

DeviceInfo CudaDevice::describe() const {
  use_gpu(options_.ordinal);
  const std::lock_guard lock(mutex_);
  return {"cuda", name_, memory_bytes_, free_bytes(), locks_mapped_};
}

DeviceAddress CudaDevice::allocate(int64_t bytes, const char* purpose) {
  use_gpu(options_.ordinal);
  const int64_t size = align_up(std::max<int64_t>(bytes, 1), kDeviceAlignment);
  const std::lock_guard lock(mutex_);
  const bool within = options_.limit_bytes == 0 || size <= options_.limit_bytes - allocated_bytes_;
  void* memory = nullptr;
  const cudaError_t status =
      within ? cudaMalloc(&memory, static_cast<size_t>(size)) : cudaErrorMemoryAllocation;
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // taken note of
    const std::string limit =
        options_.limit_bytes == 0 ? "" : ", limit " + size_text(options_.limit_bytes);
    fail(ErrorKind::kMemory, "[cuda] ", purpose, " needs ", size_text(bytes),
         " on cuda:", options_.ordinal, ", ", size_text(free_bytes()), " free", limit,
         "; lower the context, close other programs that use the GPU, or allow more");
  }
  check(status, "allocating memory");
  const auto address = static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(memory));
  allocations_.emplace(address, size);
  allocated_bytes_ += size;
  return address;
}

void CudaDevice::release(DeviceAddress address) {
  if (address == DeviceAddress::kNull) return;
  cudaSetDevice(options_.ordinal);
  const std::lock_guard lock(mutex_);
  const auto it = allocations_.find(address);
  assert(it != allocations_.end());
  cudaFree(pointer(address));  // fails only after work has failed, which synchronize() reports
  allocated_bytes_ -= it->second;
  allocations_.erase(it);
}

std::byte* CudaDevice::allocate_host(int64_t bytes, const char* purpose) {
  use_gpu(options_.ordinal);
  return PinnedMemory(bytes, purpose).release();
}

void CudaDevice::release_host(std::byte* memory) {
  cudaSetDevice(options_.ordinal);
  cudaFreeHost(memory);
}

bool CudaDevice::pin(const void* memory, int64_t bytes, bool written) {
  use_gpu(options_.ordinal);
  const auto locked = [&](unsigned flags) {
    const cudaError_t status =
        cudaHostRegister(const_cast<void*>(memory), static_cast<size_t>(bytes), flags);
    if (status != cudaSuccess) cudaGetLastError();  // taken note of
    return status == cudaSuccess;
  };
  // Memory that is mapped for reading alone can be locked in no other way.
  if (!written && locks_mapped_ && locked(cudaHostRegisterPortable | cudaHostRegisterReadOnly)) {
    return true;
  }
  return locked(cudaHostRegisterPortable);
}

void CudaDevice::unpin(const void* memory) {
  cudaSetDevice(options_.ordinal);
  cudaHostUnregister(const_cast<void*>(memory));
}

std::unique_ptr<Stream> CudaDevice::create_stream() {
  return std::make_unique<CudaStream>(options_.ordinal);
}

std::unique_ptr<Event> CudaDevice::create_event() {
  return std::make_unique<CudaEvent>(options_.ordinal);
}

int64_t CudaDevice::workspace_bytes(const Plan& plan, std::span<const UnitSpec> units) const {
  return layout_of(plan, units).bytes;
}

WorkspaceLayout CudaDevice::layout_of(const Plan& plan, std::span<const UnitSpec> units) const {
  return {plan, units, blas_workspace_bytes(compute_ / 10), multiprocessors_};
}

std::unique_ptr<Stage> CudaDevice::compile(const StageSpec& spec) {
  for (const Weight& weight : spec.weights) {
    if (!takes(weight.format)) refuse_format("cuda", weight.format);
  }
  use_gpu(options_.ordinal);
  const StageOptions stage{options_.ordinal, compute_, multiprocessors_, options_.graphs,
                           options_.overlap};
  const WorkspaceLayout layout = layout_of(*spec.plan, spec.units);
  const DeviceAddress tables = spec.workspace + (spec.second ? layout.second_tables : 0);
  return std::make_unique<CudaStage>(spec, layout, stage, blas_, upload_to(tables, *spec.plan));
}

std::shared_ptr<StepUpload> CudaDevice::upload_to(DeviceAddress tables, const Plan& plan) {
  const std::lock_guard lock(mutex_);
  std::erase_if(uploads_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<StepUpload>& known = uploads_[tables];
  std::shared_ptr<StepUpload> upload = known.lock();
  if (upload == nullptr || &upload->plan() != &plan) {
    upload = std::make_shared<StepUpload>(plan, options_.ordinal, pointer(tables));
    known = upload;
  }
  return upload;
}

}  // namespace helm::cuda
