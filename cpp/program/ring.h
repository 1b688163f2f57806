// Room on a device for what is there for a moment, in two buffers in turn: while one is read the
// other is filled.
#pragma once

#include <array>
#include <memory>

#include "device/memory.h"

namespace helm {

class Ring {
 public:
  struct Buffer {
    DeviceAddress address = DeviceAddress::kNull;
    std::unique_ptr<Event> loaded;
    std::unique_ptr<Event> read;  // by the stage that used it last
  };

  Ring() = default;
  Ring(Account& account, int64_t buffer_bytes, const char* purpose)
      : memory_(account, 2 * buffer_bytes, purpose) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      buffers_[i] = {memory_.address() + static_cast<int64_t>(i) * buffer_bytes,
                     account.device().create_event(), account.device().create_event()};
    }
  }

  Buffer& operator[](size_t i) { return buffers_[i % buffers_.size()]; }
  const Buffer& operator[](size_t i) const { return buffers_[i % buffers_.size()]; }
  size_t next() { return turn_++ % buffers_.size(); }
  int64_t bytes() const { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
  std::array<Buffer, 2> buffers_;
  size_t turn_ = 0;
};

}  // namespace helm
