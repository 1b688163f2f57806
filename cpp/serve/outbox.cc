#include "serve/outbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace helm {

Outbox::Impl::~Impl() {
  if (fd_ >= 0) ::close(fd_);
}

std::vector<Event> Outbox::Impl::poll() {
  const std::lock_guard lock(mutex_);
  if (fd_ >= 0 && !events_.empty()) {
    eventfd_t count = 0;
    eventfd_read(fd_, &count);  // it is readable, and nobody else reads it
  }
  return std::exchange(events_, {});
}

bool Outbox::Impl::wait(double seconds, bool ended) {
  std::unique_lock lock(mutex_);
  const auto there = [&] { return ended ? open_ == 0 : !events_.empty(); };
  int64_t& waiting = ended ? for_end_ : for_any_;
  ++waiting;
  constexpr double kLongest = 1e6;  // what the clock can add
  const std::chrono::duration<double> most(std::clamp(seconds, 0.0, kLongest));
  const bool came = changed_.wait_for(lock, most, there);
  --waiting;
  return came;
}

int Outbox::Impl::event_fd() {
  const std::lock_guard lock(mutex_);
  if (fd_ < 0) {
    fd_ = eventfd(events_.empty() ? 0 : 1, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd_ < 0) {
      fail(ErrorKind::kMemory, "[service] the system gives no eventfd: ", std::strerror(errno),
           "; close files or raise the limit of open ones");
    }
  }
  return fd_;
}

void Outbox::Impl::opened() {
  const std::lock_guard lock(mutex_);
  ++open_;
}

void Outbox::Impl::closed() {
  const std::lock_guard lock(mutex_);
  --open_;
  tell();
}

void Outbox::Impl::put(std::vector<Event>&& events) {
  const std::lock_guard lock(mutex_);
  const bool first = events_.empty();
  for (const Event& event : events) open_ -= event.token.finish != Finish::kNone ? 1 : 0;
  if (first) {
    events_ = std::move(events);
  } else {
    std::move(events.begin(), events.end(), std::back_inserter(events_));
  }
  if (first && fd_ >= 0) eventfd_write(fd_, 1);
  tell();
}

void Outbox::Impl::tell() {
  if ((for_any_ > 0 && !events_.empty()) || (for_end_ > 0 && open_ == 0)) changed_.notify_all();
}

Outbox::Outbox() : impl_(std::make_unique<Impl>()) {}
Outbox::~Outbox() = default;
std::vector<Event> Outbox::poll() {
  return impl_->poll();
}
bool Outbox::wait(double seconds, bool ended) {
  return impl_->wait(seconds, ended);
}
int Outbox::event_fd() {
  return impl_->event_fd();
}

}  // namespace helm
