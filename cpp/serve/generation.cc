// A fixed set of requests: a thin caller of the driver.
#include "helm/generation.h"

#include <chrono>
#include <utility>

#include "base/check.h"
#include "serve/driver.h"

namespace helm {

class Generation::Impl {
 public:
  Impl(Engine& engine, std::vector<Request> requests, PrefixCache* prefixes,
       Speculation speculation)
      : driver_(engine, prefixes, std::move(speculation)), count_(std::ssize(requests)) {
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::string where = "[generate] request " + std::to_string(i) + ": ";
      check_request(engine.plan(), requests[i], where);
      check_sequence(engine, requests[i], where);
      for (size_t j = 0; j < i; ++j) {
        if (requests[i].sequence >= 0 && requests[i].sequence == requests[j].sequence) {
          fail(ErrorKind::kInvalid, "[generate] requests ", j, " and ", i,
               " continue the same sequence, ", requests[i].sequence);
        }
      }
    }
    RequestId id = 0;
    for (Request& request : requests) {
      request.streamed = false;
      driver_.add(std::make_unique<Active>(id++, engine.plan(), std::move(request)));
    }
  }

  bool done() const { return !driver_.has_tokens() && driver_.ended(); }

  std::vector<Token> advance(double seconds) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    do {
      if (driver_.ended()) break;
      driver_.step();
    } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
    return driver_.take_tokens();
  }

  void cancel(RequestId request) {
    at(request);
    driver_.cancel(request);
  }

  const Active& at(RequestId request) const {
    if (request >= 0 && request < count_) return *driver_.table().find(request);
    fail(ErrorKind::kInvalid, "[generate] request ", request, " was named; expected 0 to ",
         count_ - 1, ", as they were given");
  }

 private:
  Driver driver_;
  int64_t count_;
};

Generation::Generation(Engine& engine, std::vector<Request> requests, PrefixCache* prefixes,
                       Speculation speculation)
    : impl_(std::make_unique<Impl>(engine, std::move(requests), prefixes, std::move(speculation))) {
}
Generation::~Generation() = default;

bool Generation::done() const {
  return impl_->done();
}
std::vector<Token> Generation::advance(double seconds) {
  return impl_->advance(seconds);
}
void Generation::cancel(RequestId request) {
  impl_->cancel(request);
}
void Generation::rethrow(RequestId request) const {
  if (const auto& failure = impl_->at(request).failure) std::rethrow_exception(failure);
}
RequestTimings Generation::timings(RequestId request) const {
  return impl_->at(request).timings;
}

}  // namespace helm
