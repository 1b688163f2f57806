// The modes of the driver's steps, where the plan has tables of their seconds: far rows that wait
// leave the batch, and requests that would be far begin while that pays.
#include <algorithm>
#include <utility>

#include "serve/driver.h"

namespace helm {
namespace {

constexpr int64_t kTargetSteps = 64;  // for which a number of far requests is good

}  // namespace

// Whether the CPU attends for its next token, if that is computed alone.
bool Driver::is_far(const Active& active) const {
  return engine_.moves() &&
         (engine_.side(active.sequence) == KvSide::kFar || far_blocks(active) > 0);
}

// The mode of the step that the batch is of, whose last rows are those of a second sub-batch.
// Without tables far rows do not wait.
void Driver::choose_mode() {
  choice_ = {};
  if (!engine_.moves()) return;
  const RequestTable::List& running = table_.running();
  const Plan& plan = engine_.plan();
  const double now_s = seconds_of(Clock::now());
  ModeSnapshot now;
  now.most_rows = plan.limits.step_tokens;
  now.most_outputs = plan.limits.step_outputs;
  now.usual_s = usual_s_;
  std::vector<size_t> places;  // of the snapshot's rows, in the batch
  for (size_t i = 0; i < batch_.rows.size(); ++i) {
    const BatchRow& row = batch_.rows[i];
    const Active& active = *running[row.runner];
    const int64_t length = engine_.length(active.sequence);
    if (active.decoding() && row.tokens == 1) {
      places.push_back(i);
      now.rows.push_back({length + 1, is_far(active), active.skips, now_s - active.last_token_s()});
      continue;
    }
    // Tokens that a constraint forces are computed like those of a prompt.
    const int64_t whole = active.decoding() ? row.tokens : std::ssize(active.request.prompt);
    now.prompts.push_back({length, row.tokens, whole, row.output, far_blocks(active) > 0});
  }
  const bool some_far = std::ranges::any_of(now.rows, &ModeRow::far);
  if (!modes_) {
    choice_.mode = some_far ? StepMode::kJoint : StepMode::kNear;
    return;
  }
  choice_ = modes_->choose(now);
  if (!some_far) return;
  std::vector<bool> waits(batch_.rows.size());
  for (size_t i = 0; i < places.size(); ++i) waits[places[i]] = now.rows[i].far;
  for (const size_t i : choice_.far) waits[places[i]] = false;
  std::vector<BatchRow> second;
  for (const size_t i : choice_.second) second.push_back(batch_.rows[places[i]]);
  for (const size_t place : places) {
    int64_t& skips = running[batch_.rows[place].runner]->skips;
    skips = waits[place] ? skips + 1 : 0;
  }
  for (const BatchRow& row : second) running[row.runner]->skips = 0;
  size_t place = 0;
  std::erase_if(batch_.rows, [&](const BatchRow&) { return waits[place++]; });
  batch_.rows.insert(batch_.rows.end(), second.begin(), second.end());
}

void Driver::note_mode(const ModeChoice& choice, double measured_s) {
  ModeUse& use = mode_uses_[static_cast<size_t>(choice.mode)];
  ++use.steps;
  if (!modes_ || choice.table_s == 0) return;
  use.predicted_s += choice.table_s;
  use.measured_s += measured_s;
  modes_->note(choice, measured_s);
}

void Driver::follow(double& mean, double value) {
  constexpr double kLatest = 0.1;  // its weight
  mean = mean == 0 ? value : mean + kLatest * (value - mean);
}

// A request that has ended is one more to judge others by.
void Driver::note_end(const Active& active) {
  if (active.failure) return;
  const int64_t prompt = std::ssize(active.request.prompt) - active.generated;
  follow(shape_.prompt, static_cast<double>(std::max<int64_t>(1, prompt)));
  follow(shape_.output, static_cast<double>(std::max<int64_t>(1, active.generated)));
}

// Whether one that waits may begin: there is room near beside those that run, or it is one of as
// many far ones as pay. One that is alone always may, and one that is to be
// refused.
bool Driver::may_begin(const Active& active) {
  if (!modes_ || table_.running().empty() || !active.own_sequence()) return true;
  const int64_t page_tokens = engine_.plan().kv.page_tokens;
  int64_t room = engine_.near_most(), near = 0, far = 0;
  for (const Active* other : table_.running()) {
    const int64_t blocks = other->blocks + next_blocks(other->capacity, other->most);
    const bool fits = blocks <= room;
    ++(fits ? near : far);
    room -= fits ? blocks : 0;
  }
  if ((active.most + page_tokens - 1) / page_tokens > engine_.plan().kv.blocks) return true;
  const int64_t tokens = std::ssize(active.request.prompt);
  const int64_t wanted = promised(room_.policy(), tokens, active.most, page_tokens);
  const int64_t blocks = (wanted + page_tokens - 1) / page_tokens;
  return blocks + next_blocks(wanted, active.most) <= room || far < far_target(active, near);
}

// How many far requests pay beside so many near ones. Before any has ended, all are taken to be
// like the one that waits.
int64_t Driver::far_target(const Active& active, int64_t near) {
  if (target_.near == near && steps_ < target_.until) return target_.far;
  RequestShape shape = shape_;
  if (shape.output == 0) {
    const int64_t output = std::min(active.request.max_tokens, room_.policy().promised_tokens);
    shape.prompt = static_cast<double>(std::max<size_t>(1, active.request.prompt.size()));
    shape.output = static_cast<double>(std::max<int64_t>(1, output));
  }
  const auto middle = static_cast<int64_t>(shape.prompt / 2);
  shape.chunk = std::min(shape.prompt, static_cast<double>(prompt_rows(middle)));
  const int64_t most = engine_.plan().limits.sequences - near;
  target_ = {near, modes_->far_requests(near, most, shape), steps_ + kTargetSteps};
  return target_.far;
}

}  // namespace helm
