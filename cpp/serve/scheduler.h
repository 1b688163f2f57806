// Which rows the next step has. Pure: a snapshot of the running requests in, a batch out. Knows no
// engine, no tokens and no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace helm {

// What the plan says of steps.
struct StepPolicy {
  int64_t step_tokens = 0;
  int64_t step_outputs = 0;
  int64_t decode_groups = 1;     // of the decoding requests, which take turns at the devices
  bool prefill_overlap = false;  // whether chunks of prompts may be on their way together
  int64_t most_ahead = 1;        // steps that the engine lets be on their way
};

// A running request, as far as steps are concerned.
struct Runner {
  int64_t pending = 0;  // tokens not yet submitted; none: it waits for a step on its way
  bool decoding = false;
  size_t group = 0;  // of those decoding
};

struct Snapshot {
  std::vector<Runner> runners;  // in order of arrival
  size_t next_group = 0;        // whose turn it is
  // Of prompts at most in a step in which others decode.
  int64_t prompt_rows = std::numeric_limits<int64_t>::max();
};

struct BatchRow {
  size_t runner;
  int64_t tokens;  // the first of the pending ones
  bool output;     // they are the last, and logits are wanted
};

struct Batch {
  std::vector<BatchRow> rows;  // none: every request waits for a step on its way
  std::vector<size_t> groups;  // of each runner, from now on
  size_t next_group = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const StepPolicy& policy) : policy_(policy) {}

  // The requests of one decoding group take one row each; prompts share what is left of the step,
  // or what may join those, in order of arrival. While some decode prompts have no step of their
  // own: those would wait behind it. `batch` is overwritten.
  void plan(const Snapshot& snapshot, Batch& batch) const;
  // How many steps may be on their way: as long as a prompt is, the plan says for prompts.
  int64_t ahead(const Snapshot& snapshot) const;

 private:
  bool choose_group(const Snapshot& snapshot, Batch& batch, size_t& chosen) const;

  StepPolicy policy_;
};

}  // namespace helm
