// Where reads of weights end: in the CPU's memory, on an accelerator, or in a matrix that is
// encoded as a whole. Several threads use a sink at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/compression.h"
#include "cpu/kernels/kernels.h"
#include "device/memory.h"
#include "weights/encode.h"
#include "weights/reads.h"

namespace helm {

class Sink {
 public:
  explicit Sink(const Format& format) : format_(format) {}
  virtual ~Sink() = default;
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;

  const Format& format() const { return format_; }
  // Does the read, as the worker of this number.
  virtual void take(const Read& read, int worker) = 0;

 private:
  Format format_;
};

// A slice in host memory.
class ArenaSink final : public Sink {
 public:
  // to: where the slice begins.
  ArenaSink(const Format& format, const cpu::KernelTable& kernels, std::byte* to)
      : Sink(format), kernels_(kernels), to_(to) {}
  void take(const Read& read, int worker) override;

 private:
  const cpu::KernelTable& kernels_;
  std::byte* to_;
};

// A slice of bf16c in host memory. Throws Error{kCompression} for weights that do not compress.
class EncodeSink final : public Sink {
 public:
  EncodeSink(const Format& format, const cpu::KernelTable& kernels, std::byte* to, int64_t rows,
             int64_t cols)
      : Sink(format), kernels_(kernels), compression_(to, rows, cols) {}
  void take(const Read& read, int worker) override;

 private:
  const cpu::KernelTable& kernels_;
  cpu::Compression compression_;
};

// Sends rows to an accelerator. Every worker fills one of its two page-locked buffers while the
// other is on its way.
class Uploader {
 public:
  // host: the account that the buffers are taken from.
  Uploader(Device& device, Account& host, int workers, int64_t buffer_bytes);
  ~Uploader();

  // fill(memory): writes the bytes into a buffer's memory.
  template <typename Fill>
  void send(DeviceAddress to, int64_t bytes, int worker, const Fill& fill) {
    Buffer& buffer = next_buffer(worker);
    fill(buffer.memory.data());
    send(to, bytes, buffer);
  }
  void finish() { stream_->synchronize(); }

 private:
  struct Buffer {
    StagingMemory memory;
    std::unique_ptr<Event> sent;
  };

  Buffer& next_buffer(int worker);  // once its copy is done
  void send(DeviceAddress to, int64_t bytes, Buffer& buffer);

  std::vector<Buffer> buffers_;  // [workers, 2]
  std::vector<size_t> turn_;     // [workers]
  std::unique_ptr<Stream> stream_;
  std::mutex mutex_;  // of the stream
};

// A slice on an accelerator.
class UploadSink final : public Sink {
 public:
  // uploader: there before the first take().
  UploadSink(const Format& format, const cpu::KernelTable& kernels,
             const std::unique_ptr<Uploader>& uploader, DeviceAddress to)
      : Sink(format), kernels_(kernels), uploader_(uploader), to_(to) {}
  void take(const Read& read, int worker) override;

 private:
  const cpu::KernelTable& kernels_;
  const std::unique_ptr<Uploader>& uploader_;
  DeviceAddress to_;
};

}  // namespace helm
