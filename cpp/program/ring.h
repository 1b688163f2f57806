// Room on a device for what is there for a moment, in buffers in turn: while one is read others are
// filled.
#pragma once

#include <memory>
#include <vector>

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
  Ring(Account& account, int64_t buffers, int64_t buffer_bytes, const char* purpose)
      : memory_(account, buffers * buffer_bytes, purpose) {
    for (int64_t i = 0; i < buffers; ++i) {
      buffers_.push_back({memory_.address() + i * buffer_bytes, account.device().create_event(),
                          account.device().create_event()});
    }
  }

  Buffer& operator[](size_t i) { return buffers_[i % buffers_.size()]; }
  const Buffer& operator[](size_t i) const { return buffers_[i % buffers_.size()]; }
  size_t next() { return turn_++ % buffers_.size(); }
  int64_t bytes() const { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
  std::vector<Buffer> buffers_;
  size_t turn_ = 0;
};

}  // namespace helm
