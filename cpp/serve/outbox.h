// The inside of an outbox: what the service's thread puts there.
#pragma once

#include <condition_variable>
#include <mutex>
#include <vector>

#include "helm/service.h"

namespace helm {

class Outbox::Impl {
 public:
  ~Impl();
  std::vector<Event> poll();
  bool wait(double seconds, bool ended);
  int event_fd();

  void opened();                          // one request more
  void closed();                          // one less, without an event
  void put(std::vector<Event>&& events);  // of one step

 private:
  void tell();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  int64_t open_ = 0;     // requests that have not ended
  int64_t for_any_ = 0;  // threads that wait for an event
  int64_t for_end_ = 0;  // threads that wait for the end
  int fd_ = -1;
};

}  // namespace helm
