#include "serve/scheduler.h"

#include <algorithm>

namespace helm {

// The group of decoding requests whose turn it is, all of them back from their last step; false if
// every group is on its way. Groups stay of equal size, so that neither device waits for long.
bool Scheduler::choose_group(const Snapshot& snapshot, Batch& batch, size_t& chosen) const {
  const auto groups = static_cast<size_t>(policy_.decode_groups);
  std::vector<int64_t> members(groups, 0);
  std::vector<bool> ready(groups, true);
  for (const Runner& runner : snapshot.runners) {
    batch.groups.push_back(runner.group);
    if (runner.decoding) ++members[runner.group];
  }
  for (size_t i = 0; i < snapshot.runners.size(); ++i) {
    const Runner& runner = snapshot.runners[i];
    if (!runner.decoding) continue;
    const auto least =
        static_cast<size_t>(std::min_element(members.begin(), members.end()) - members.begin());
    size_t& group = batch.groups[i];
    if (runner.pending > 0 && members[group] > members[least] + 1) {
      --members[group];
      ++members[group = least];
    }
    if (runner.pending == 0) ready[group] = false;
  }
  for (size_t i = 0; i < groups; ++i) {
    const size_t group = (snapshot.next_group + i) % groups;
    if (members[group] == 0 || !ready[group]) continue;
    batch.next_group = (group + 1) % groups;
    chosen = group;
    return true;
  }
  return false;
}

void Scheduler::plan(const Snapshot& snapshot, Batch& batch) const {
  batch.rows.clear();
  batch.groups.clear();
  batch.next_group = snapshot.next_group;
  int64_t rows = policy_.step_tokens;
  int64_t outputs = policy_.step_outputs;
  size_t group = 0;
  const bool decodes = choose_group(snapshot, batch, group);
  const bool decoders = std::any_of(snapshot.runners.begin(), snapshot.runners.end(),
                                    [](const Runner& runner) { return runner.decoding; });
  for (const bool decoding : {true, false}) {
    if (decoding && !decodes) continue;
    if (!decoding && decoders) rows = std::min(rows, decodes ? snapshot.prompt_rows : 0);
    for (size_t i = 0; i < snapshot.runners.size() && rows > 0; ++i) {
      const Runner& runner = snapshot.runners[i];
      if (runner.decoding != decoding || runner.pending == 0) continue;
      if (decoding && batch.groups[i] != group) continue;
      const int64_t tokens = std::min(rows, runner.pending);
      const bool last = tokens == runner.pending;
      if (last && outputs == 0) continue;
      rows -= tokens;
      outputs -= last ? 1 : 0;
      batch.rows.push_back({i, tokens, last});
    }
  }
}

int64_t Scheduler::ahead(const Snapshot& snapshot) const {
  const bool prompts = std::any_of(snapshot.runners.begin(), snapshot.runners.end(),
                                   [](const Runner& runner) { return !runner.decoding; });
  const bool overlaps = prompts ? policy_.prefill_overlap : policy_.decode_groups > 1;
  return overlaps ? policy_.most_ahead : 1;
}

}  // namespace helm
