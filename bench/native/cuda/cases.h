// The timed cases of the CUDA benchmark: one object per case, verified before it is timed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace helm::bench {

// Throws Error that names the call and what CUDA says.
void check(cudaError_t error, const char* what);

// Device memory, freed with the object.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  template <class T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

// One launch reads `bytes`; consecutive launches read different copies, so that none finds its
// operands in L2.
class Case {
 public:
  virtual ~Case() = default;
  virtual void enqueue(cudaStream_t stream) = 0;
  std::string name;
  int64_t bytes = 0;
};

// Makes each case whose name begins with a text that contains `match`, one at a time, and calls
// `use` with it. Throws Error if a kernel's result is wrong.
void for_each_case(const std::string& match, const std::function<void(Case&)>& use);

// Reads [p, p + bytes) once, as fast as the device can: the ceiling.
void stream_read(const void* p, int64_t bytes, float* sink, cudaStream_t stream);

}  // namespace helm::bench
