// Steps: inputs checked, room made for the KV blocks they write, rows laid out, submitted.
#include <algorithm>

#include "base/check.h"
#include "engine/engine_impl.h"

namespace helm {
namespace {

// Rows of logits that an input asks for, of its tokens at the end.
int64_t outputs_of(const StepInput& input) {
  if (input.outputs == StepInput::Outputs::kNone) return 0;
  return input.outputs == StepInput::Outputs::kLast ? input.last : std::ssize(input.tokens);
}

}  // namespace
using Clock = std::chrono::steady_clock;

void Engine::Impl::check_tokens(const StepInput& input) const {
  const KvSequence& target = sequence(input.sequence);
  const auto count = static_cast<int64_t>(input.tokens.size());
  if (count == 0)
    fail(ErrorKind::kInvalid, "[engine] no tokens given for sequence ", input.sequence);
  if (target.length + count > target.capacity) {
    fail(ErrorKind::kCapacity, "[engine] sequence ", input.sequence, " holds ", target.length,
         " positions and was opened for ", target.capacity, ", ", count, " more do not fit");
  }
  for (size_t i = 0; i < input.tokens.size(); ++i) {
    if (input.tokens[i] < 0 || input.tokens[i] >= plan_.vocab_size) {
      fail(ErrorKind::kInvalid, "[engine] token ", i, " is ", input.tokens[i],
           ", outside the vocabulary of ", plan_.vocab_size);
    }
  }
}

void Engine::Impl::check(std::span<const StepInput> inputs) const {
  int64_t tokens = 0;
  int64_t outputs = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tokens(inputs[i]);
    for (size_t j = 0; j < i; ++j) {
      if (inputs[i].sequence == inputs[j].sequence) {
        fail(ErrorKind::kInvalid, "[engine] sequence ", inputs[i].sequence,
             " appears twice in a step");
      }
    }
    const auto count = static_cast<int64_t>(inputs[i].tokens.size());
    tokens += count;
    if (inputs[i].outputs == StepInput::Outputs::kLast &&
        (inputs[i].last < 1 || inputs[i].last > count)) {
      fail(ErrorKind::kInvalid, "[engine] outputs of the last ", inputs[i].last, " of ", count,
           " tokens were asked for; expected 1 to ", count);
    }
    outputs += outputs_of(inputs[i]);
  }
  if (tokens == 0 || tokens > plan_.limits.step_tokens || outputs > plan_.limits.step_outputs) {
    fail(ErrorKind::kCapacity, "[engine] a step of ", tokens, " tokens and ", outputs,
         " outputs was asked for, the plan allows 1 to ", plan_.limits.step_tokens, " and ",
         plan_.limits.step_outputs);
  }
}

// Of the second sub-batch of a split step.
void Engine::Impl::check_second(std::span<const StepInput> inputs) const {
  if (!splits()) {
    fail(ErrorKind::kInvalid, "[engine] a step was to be split; the plan's KV pages, schedule or ",
         "number of sequences do not let it; submit it whole");
  }
  for (const StepInput& input : inputs) {
    if (std::ssize(input.tokens) == 1) continue;
    fail(ErrorKind::kInvalid, "[engine] ", input.tokens.size(), " tokens of sequence ",
         input.sequence, " are in the second sub-batch of a step; expected one");
  }
}

// Makes room on the accelerator for the blocks that the step adds there or writes to, and makes
// those it writes to its own.
void Engine::Impl::make_room(std::span<const StepInput> inputs) {
  int64_t added = 0, far_added = 0;
  std::vector<int32_t> recalled;
  for (const StepInput& input : inputs) {
    KvSequence& target = sequence(input.sequence);
    const int64_t blocks = kv_.blocks_to_extend(target, std::ssize(input.tokens));
    target.far =
        target.far && std::ssize(input.tokens) == 1 && far_added + blocks <= kv_.far().free();
    (target.far ? far_added : added) += blocks;
    if (target.far || kv_.shares_last(target)) continue;
    kv_.keep_last_near(target);
    if (kv_.last_is_far(target)) recalled.push_back(target.blocks.back());
  }
  executor_.make_room(added, far_added, recalled);
  for (const StepInput& input : inputs) {
    KvSequence& target = sequence(input.sequence);
    if (kv_.shares_last(target)) {  // copy on write
      copy_own(target, target.blocks.size() - 1, target.length % plan_.kv.page_tokens);
    } else if (!target.far && kv_.last_is_far(target)) {  // all others have their copies by now
      executor_.move_blocks({&target.blocks.back(), 1}, false);
      kv_.keep_last_near(target);
    }
  }
}

// The sequence goes on in a block of its own in place of a shared one.
void Engine::Impl::copy_own(KvSequence& target, size_t b, int64_t positions) {
  const int32_t shared = kv_.own(target, b);
  executor_.copy_block(kv_.block(shared), kv_.block(target.blocks[b]), positions);
}

// Whether the CPU attends to far pages of the input's sequence; else they visit.
bool Engine::Impl::on_cpu(const StepInput& input) const {
  const KvSequence& target = sequence(input.sequence);
  return cpu_attends_far() && std::ssize(input.tokens) == 1 &&
         (target.far || kv_.far_blocks(target) > 0);
}

// Lays the inputs out as rows, those behind for which the CPU attends, and gives every new position
// its page. Logits come in the order of the inputs.
void Engine::Impl::gather(std::span<const StepInput> inputs, StepRows& rows) {
  rows.clear();
  std::vector<size_t> order;
  for (const bool cpu : {false, true}) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (on_cpu(inputs[i]) == cpu) order.push_back(i);
    }
    if (!cpu) rows.far.on_cpu = inputs.size() - order.size();
  }
  std::vector<int64_t> first_rows(inputs.size());
  for (const size_t at : order) {
    const StepInput& input = inputs[at];
    KvSequence& target = sequence(input.sequence);
    const auto first_row = first_rows[at] = std::ssize(rows.token_ids);
    const auto count = static_cast<int64_t>(input.tokens.size());
    // Windows keep as much as the plan has pages for, so that guesses can be taken back.
    kv_.leave_behind(target,
                     std::max<int64_t>(0, target.length + count - plan_.limits.step_tokens));
    kv_.extend(target, target.length + count);
    for (int64_t i = 0; i < count; ++i) {
      rows.token_ids.push_back(input.tokens[static_cast<size_t>(i)]);
      rows.positions.push_back(static_cast<int32_t>(target.length + i));
    }
    rows.runs.push_back({first_row, count, target.length, nullptr});
    for (const int32_t block : target.blocks) {
      kv_.append_pages(kv_.block(block), false, rows.pages);
    }
    rows.far.blocks.push_back(kv_.far_blocks(target));
    for (int64_t b = 0; b < rows.far.blocks.back(); ++b) {
      kv_.append_pages(kv_.block(target.blocks[static_cast<size_t>(b)]), true, rows.far.pages);
    }
    kv_.grown(target, target.length + count);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t end = first_rows[i] + std::ssize(inputs[i].tokens);
    for (int64_t row = end - outputs_of(inputs[i]); row < end; ++row) {
      rows.output_rows.push_back(static_cast<int32_t>(row));
    }
  }
  const int32_t* pages = rows.pages.data();
  for (SequenceRun& run : rows.runs) {
    run.pages = pages;
    pages += kv_.blocks_for(run.first_position + run.tokens) * plan_.kv.entries();
  }
}

void Engine::Impl::take_spent() {
  const ThreadPool::Spent spent = threads_.take_spent();
  step_spent_.run_s += spent.run_s;
  step_spent_.lost_s += spent.lost_s;
}

// Prompts take all members: they meet so seldom there that one who is late costs little. Where all
// of several rows per sequence give logits, guesses are among them: such steps are decode, but of
// too many sizes to be compared.
void Engine::Impl::size_team(std::span<const StepInput> inputs) {
  int64_t tokens = 0, outputs = 0;
  for (const StepInput& input : inputs) {
    tokens += std::ssize(input.tokens);
    outputs += outputs_of(input);
  }
  take_spent();
  if (decoded_) team_size_.ran(step_spent_.run_s, step_spent_.lost_s);
  step_spent_ = {};
  decoded_ = tokens == std::ssize(inputs);
  const double now_s = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  const bool guesses = !decoded_ && outputs == tokens;
  threads_.resize(decoded_  ? team_size_.next(tokens, now_s)
                  : guesses ? team_size_.size()
                            : threads_.size());
}

// Where KV overflows, any step must find room for what it writes: its new blocks, and the last one
// of every sequence, which never leaves.
void Engine::Impl::check_pools() const {
  if (!kv_.overflows()) return;
  const int64_t least = kv_.blocks_for(plan_.limits.step_tokens) + 2 * plan_.limits.sequences;
  if (kv_.near().slots() >= least) return;
  fail(ErrorKind::kInvalid, "[plan] schedule.pages.", plan_.devices[Plan::kFirstAccelerator].name,
       ": holds ", kv_.near().slots(), " blocks of KV pages, steps of ", plan_.limits.step_tokens,
       " tokens of ", plan_.limits.sequences, " sequences need ", least,
       "; give the KV cache more memory there or lower step_tokens");
}

std::span<const float> Engine::Impl::step(std::span<const StepInput> inputs) {
  if (in_flight() > 0) {
    fail(ErrorKind::kInvalid, "[engine] ", in_flight(),
         " submitted steps were not collected; collect them, or let the generation that has "
         "submitted them end");
  }
  submit(inputs);
  return collect();
}

void Engine::Impl::submit(std::span<const StepInput> inputs, size_t second) {
  if (in_flight() >= steps_ahead()) {
    fail(ErrorKind::kCapacity, "[engine] ", in_flight(),
         " steps are on their way, the most at once; collect one first");
  }
  check(inputs);
  const auto first = inputs.first(inputs.size() - std::min(second, inputs.size()));
  const bool split = second > 0 && !first.empty();
  if (split) check_second(inputs.last(second));
  weights_.check_files(false);
  make_room(inputs);
  gather(split ? first : inputs, executor_.rows());
  if (split) gather(inputs.last(second), executor_.second_rows());
  size_team(inputs);
  executor_.submit(split);
}

std::span<const float> Engine::Impl::collect() {
  if (in_flight() == 0) fail(ErrorKind::kInvalid, "[engine] no step was submitted");
  const std::span<const float> logits = executor_.collect();
  weights_.check_files(true);
  weights_.check_scales(logits);
  return logits;
}

// What it takes is no part of a step.
void Engine::Impl::share(int64_t count, const std::function<void(int64_t, int)>& work) {
  take_spent();
  threads_.run([&](Team& team) {
    team.parallel_for(count, 1, [&](int64_t i, int64_t) { work(i, team.worker()); });
  });
  threads_.take_spent();
}

}  // namespace helm
