// An engine that works in a thread of its own for requests that come and go at any time.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "helm/generation.h"
#include "helm/predictor.h"
#include "helm/prefix_cache.h"

namespace helm {

// One token of a request, or its end. With Finish::kError there is no token (-1), and `error` says
// why; an event whose finish is not kNone is the request's last.
struct Event {
  Token token;
  RequestTimings timings;     // of the request so far
  int64_t cached_tokens = 0;  // of its prompt, found and not computed
  std::exception_ptr error;
};

// What a service has for one of its users, filled once per step. Any thread may call any of this;
// no call takes longer than said.
class HELM_API Outbox {
 public:
  Outbox();
  ~Outbox();
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  std::vector<Event> poll();  // what has come since the last call
  // Waits for an event or, with `ended`, until every request has ended, at most so long; whether
  // that is so. Does not wait for requests that are being submitted.
  bool wait(double seconds, bool ended = false);
  // Readable while there are events: an eventfd, which lives as long as the outbox. Made when first
  // asked for; throws kMemory where the system has none left.
  int event_fd();

  class HELM_LOCAL Impl;

 private:
  friend class Service;
  std::unique_ptr<Impl> impl_;
};

struct ServiceOptions {
  bool prefix_cache = true;  // whether requests begin with what others have computed
  Speculation speculation = {};
};

struct ServiceStats {
  int64_t running = 0;          // requests that have a sequence
  int64_t parked = 0;           // of those that wait: that had one, and gave it to others
  int64_t waiting = 0;          // for room or for a prefix
  int64_t steps = 0;            // since the start
  int64_t tokens = 0;           // drawn since then
  int64_t guessed_tokens = 0;   // computed on a guess since then
  int64_t accepted_tokens = 0;  // of them, those that were right
  double saved_s = 0;           // see RequestTimings; of all requests
  int64_t kv_blocks_used = 0;   // reserved by running requests
  int64_t kv_blocks_total = 0;
  int64_t preemptions = 0;      // times that a request was parked
  int64_t kv_blocks_moved = 0;  // from the accelerator to host memory, since the start
  int64_t moves_far = 0;        // times that a request's KV went there as a whole
  int64_t moves_near = 0;       // and came back
  ModeUses modes;               // of steps
  int64_t far_rows = 0;         // for which the CPU attended, of all steps
  ExpertsUse experts;           // since the engine's start
};

// Nobody else may call the engine but within between_steps(). All calls may come from any thread,
// and none from within between_steps() but submit(), cancel() and stats(). In a forked child, which
// lacks the thread, calls throw kInvalid, and the destructor leaves everything as it is.
class HELM_API Service {
 public:
  // Throws kMemory where the system starts no thread, kInvalid for a speculation_obstacle().
  explicit Service(std::shared_ptr<Engine> engine, const ServiceOptions& options = {});
  ~Service();  // stop(0)
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // A request without a sequence of its own; its events go to the outbox. Throws kInvalid, and
  // kCapacity for a prompt that is too long; kInvalid too after drain(). A step that fails ends all
  // requests with its error, a failure of one request that one.
  RequestId submit(Request request, const std::shared_ptr<Outbox>& outbox);
  // Several, which begin together; if one is bad none begins. Their ids, in order. more: others
  // follow at once, for which an engine at rest waits until begin(), so that they share its steps.
  std::vector<RequestId> submit_all(std::vector<Request> requests,
                                    const std::shared_ptr<Outbox>& outbox, bool more = false);
  void begin();
  // Within a step the request is gone, and what it computed is kept as a prefix. Without effect on
  // one that has ended. No event tells of it; those in the outbox stay there.
  void cancel(RequestId request);
  // Runs `work` in the calling thread while no step runs, after whatever was submitted or cancelled
  // before has been noted; throws what it throws. `prefixes` is null without a prefix cache.
  // Several callers get their turns in order, with a step between two of them.
  // Without `waits` it throws kInvalid while another caller has its turn.
  void between_steps(const std::function<void(Engine&, PrefixCache* prefixes)>& work,
                     bool waits = true);
  // In work between steps: so many sequences more, or less, are kept open by the caller beyond it.
  // Requests that find no room wait for theirs.
  void held(int64_t change);
  // Waits until some request has ended or some work between steps is done, at most so long: then
  // there may be room where there was none. False if nothing runs that could end.
  bool wait_for_room(double seconds);

  // What a step that decodes for a streamed request may take, as far as prompts that it computes
  // make it longer; 0, as at first: 2.25 times one without prompts in which all that run decode, at
  // least 50 ms. As between_steps(); throws kInvalid.
  void pace(double step_target_s);
  // Ends the requests that have not begun, each with this error. As between_steps().
  void refuse_waiting(const std::exception_ptr& why);
  void drain();                // refuses what is submitted from now on
  void stop(double grace_s);   // drains, waits so long for what is open, ends that with an error
  void freeze() noexcept;      // no step after this one; what is open stays so for ever
  ServiceStats stats() const;  // of the last step
  std::exception_ptr failure() const;  // of the last step that failed; null: none did
  const Engine& engine() const;        // for plan() and check_process()
  PrefixCache* prefixes();             // for work between steps; null: there is none

 private:
  class HELM_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace helm
