// The timed cases of the CUDA benchmark: one object per case, verified before it is timed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "helm/format.h"
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
  Case(std::string what, int64_t read_bytes) : name(std::move(what)), bytes(read_bytes) {}
  virtual ~Case() = default;
  virtual void enqueue(cudaStream_t stream) = 0;
  // A case that computes rather than reads says how much, and has the same by the kernel in f32,
  // which it is compared with.
  virtual double flops() const { return 0; }
  virtual void enqueue_f32(cudaStream_t) {}
  const std::string name;
  const int64_t bytes;
};

int multiprocessors();  // of the device

// A decoder layer of a model with norms of q and k, and a gated MLP.
struct LayerShape {
  const char* name;
  int64_t width, heads, kv_heads, head_dim, inner;
};
// overlaps: launched as Queue says, which the device has to be able to.
std::unique_ptr<Case> layer_case(const std::string& name, const LayerShape& shape,
                                 int64_t rotation_bytes, bool overlaps);

// A product of `tokens` tokens with a packed matrix. packed.cu.
std::unique_ptr<Case> packed_case(const std::string& name, const Format& format, int64_t tokens,
                                  int64_t rows, int64_t cols, int64_t rotation_bytes);

// Attention of `tokens` tokens with `behind` positions before them. prompt.cu.
std::string prompt_name(DType dtype, int64_t tokens, int64_t behind);
std::unique_ptr<Case> prompt_case(const std::string& name, DType dtype, int64_t tokens,
                                  int64_t behind);

// Makes each case whose name contains one of `matches`, all if there is none, one at a time, and
// calls `use` with it. Copies of its operands take about `rotation_bytes`. Throws Error if a
// kernel's result is wrong.
void for_each_case(const std::vector<std::string>& matches, int64_t rotation_bytes,
                   const std::function<void(Case&)>& use);

// Reads [p, p + bytes) once, as fast as the device can: the ceiling.
void stream_read(const void* p, int64_t bytes, float* sink, cudaStream_t stream);

}  // namespace helm::bench
