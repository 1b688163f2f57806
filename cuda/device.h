// A CUDA GPU as a helm::Device: memory under a limit, streams, events and stages. Knows nothing of
// plugins or of how cuBLAS was found.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "cuda/cublas.h"
#include "cuda/workspace.h"
#include "device/device.h"

namespace helm::cuda {

struct DeviceOptions {
  int ordinal = 0;
  int64_t limit_bytes = 0;  // that allocate() hands out at most; 0: no limit but the GPU's memory
  bool graphs = true;       // replay decode steps as CUDA graphs
  bool overlap = false;     // launch kernels before the ones before them end, where the GPU can
};

// Makes the GPU current for this thread, as every entry point of the plugin does.
void use_gpu(int ordinal);

// Page-locked host memory.
class PinnedMemory {
 public:
  PinnedMemory(int64_t bytes, const char* purpose);  // throws Error{kMemory}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return data_; }
  std::byte* release();  // the caller frees it with cudaFreeHost

 private:
  std::byte* data_;
};

// Streams and events depend on nothing but their GPU: the device may be destroyed before them.
class CudaEvent : public Event {
 public:
  explicit CudaEvent(int ordinal);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  void synchronize() override;
  cudaEvent_t handle() const { return event_; }

 private:
  int ordinal_;
  cudaEvent_t event_ = nullptr;
};

class CudaStream : public Stream {
 public:
  explicit CudaStream(int ordinal);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  void upload(DeviceAddress to, const void* from, int64_t bytes) override;
  void download(void* to, DeviceAddress from, int64_t bytes) override;
  void record(Event& event) override;
  void wait(Event& event) override;
  void synchronize() override;
  cudaStream_t handle() const { return stream_; }

 private:
  int ordinal_;
  cudaStream_t stream_ = nullptr;
};

class StepUpload;

class CudaDevice : public Device {
 public:
  // Throws Error{kDevice} where the GPU is missing or too old.
  CudaDevice(const DeviceOptions& options, const BlasApi& blas);
  ~CudaDevice() override;  // frees what was not released
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  DeviceInfo describe() const override;
  DeviceAddress allocate(int64_t bytes, const char* purpose) override;
  void release(DeviceAddress address) override;
  std::byte* allocate_host(int64_t bytes, const char* purpose) override;
  void release_host(std::byte* memory) override;
  bool pin(const void* memory, int64_t bytes, bool written) override;
  void unpin(const void* memory) override;
  std::unique_ptr<Stream> create_stream() override;
  std::unique_ptr<Event> create_event() override;
  bool takes(const Format& format) const override { return is_dense(format) || is_packed(format); }
  int64_t workspace_bytes(const Plan& plan, std::span<const UnitSpec> units) const override;
  std::unique_ptr<Stage> compile(const StageSpec& spec) override;

 private:
  int64_t free_bytes() const;  // under mutex_
  WorkspaceLayout layout_of(const Plan& plan, std::span<const UnitSpec> units) const;
  // The one that stages of a plan share where they have their tables at the same place.
  std::shared_ptr<StepUpload> upload_to(DeviceAddress tables, const Plan& plan);

  DeviceOptions options_;
  std::string name_;
  int64_t memory_bytes_ = 0;
  int compute_ = 0;  // capability times ten
  int64_t multiprocessors_ = 0;
  bool locks_mapped_ = false;
  std::shared_ptr<Blas> blas_;  // shared with the stages

  mutable std::mutex mutex_;
  std::unordered_map<DeviceAddress, int64_t> allocations_;  // bytes by address
  int64_t allocated_bytes_ = 0;
  std::unordered_map<DeviceAddress, std::weak_ptr<StepUpload>> uploads_;
};

}  // namespace helm::cuda
