#include "serve/model_drafter.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace helm {
namespace {

constexpr double kLatestPrompt = 0.3;  // weight of the last prompt's time

std::shared_ptr<Engine> given(std::shared_ptr<Engine> engine) {
  if (engine == nullptr) fail(ErrorKind::kInvalid, "[speculate] no engine was given to draft with");
  return engine;
}

}  // namespace

ModelDrafter::ModelDrafter(std::shared_ptr<Engine> engine)
    : engine_(given(std::move(engine))), prefixes_(*engine_) {}

Draft ModelDrafter::propose(int64_t request, std::span<const int32_t> tokens, int64_t most) {
  const DraftAsk ask{request, tokens, most};
  return std::move(propose_all({&ask, 1})[0]);
}

void ModelDrafter::forget(int64_t request) {
  const auto found = texts_.find(request);
  if (found == texts_.end()) return;
  const Text text = std::move(found->second);
  texts_.erase(found);
  prefixes_.keep(text.sequence, text.held);
}

// Of the requests that are not asked for now, the one that was not for longest.
bool ModelDrafter::drop_idle() {
  auto idle = texts_.end();
  for (auto it = texts_.begin(); it != texts_.end(); ++it) {
    if (it->second.used == clock_) continue;
    if (idle == texts_.end() || it->second.used < idle->second.used) idle = it;
  }
  if (idle == texts_.end()) return false;
  forget(idle->first);
  return true;
}

bool ModelDrafter::give_room(const Text& text, int64_t capacity) {
  if (engine_->capacity(text.sequence) >= capacity) return true;
  const int64_t length = engine_->length(text.sequence);
  const int64_t more = std::min(capacity + kAhead, engine_->plan().limits.context);
  while (!engine_->can_resize(text.sequence, length, more)) {
    if (!prefixes_.give_way() && !drop_idle()) return false;
  }
  engine_->resize(text.sequence, length, more);
  return true;
}

// What is computed of the request's text, cut to what is right; null where it finds no room.
ModelDrafter::Text* ModelDrafter::text_of(const DraftAsk& ask) {
  const int64_t context = engine_->plan().limits.context;
  const int64_t capacity = std::ssize(ask.tokens) + ask.most - 1;
  auto found = texts_.find(ask.request);
  if (found == texts_.end()) {
    const int64_t more = std::min(capacity + kAhead, context);
    auto opened = prefixes_.try_open(ask.tokens, more);
    while (!opened && drop_idle()) opened = prefixes_.try_open(ask.tokens, more);
    if (!opened) return nullptr;
    Text text{opened->sequence, {ask.tokens.begin(), ask.tokens.begin() + opened->cached}, 0};
    found = texts_.emplace(ask.request, std::move(text)).first;
  }
  Text& text = found->second;
  text.used = clock_;
  if (!give_room(text, capacity)) {
    forget(ask.request);
    return nullptr;
  }
  int64_t right = std::min({common_prefix(text.held, ask.tokens), std::ssize(ask.tokens) - 1,
                            engine_->length(text.sequence)});
  if (!engine_->continues(text.sequence, right)) right = 0;  // a window has moved on
  text.held.resize(static_cast<size_t>(right));
  engine_->truncate(text.sequence, right);
  return &text;
}

// Computes what is pending, as far as a step goes, and takes the likeliest token behind each text
// that is whole.
void ModelDrafter::step(std::span<Turn> turns) {
  const Limits& limits = engine_->plan().limits;
  int64_t rows = 0, outputs = 0;
  std::vector<StepInput> inputs;
  for (Turn& turn : turns) {
    turn.waits_for_logits = false;
    const int64_t count = std::min(std::ssize(turn.pending), limits.step_tokens - rows);
    const bool whole = count == std::ssize(turn.pending);
    if (count < 1 || (whole && outputs == limits.step_outputs)) continue;
    const auto tokens = turn.pending.first(static_cast<size_t>(count));
    inputs.push_back({turn.text->sequence, tokens,
                      whole ? StepInput::Outputs::kLast : StepInput::Outputs::kNone});
    turn.pending = turn.pending.subspan(static_cast<size_t>(count));
    turn.text->held.insert(turn.text->held.end(), tokens.begin(), tokens.end());
    turn.waits_for_logits = whole;
    rows += count;
    outputs += whole ? 1 : 0;
  }
  const auto begun = std::chrono::steady_clock::now();
  std::span<const float> logits = engine_->step(inputs);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  if (rows <= kPrompt) {
    price_.note(rows, seconds);
  } else {
    const double each_s = seconds / static_cast<double>(rows);
    prompt_token_s_ += (prompt_token_s_ > 0 ? kLatestPrompt : 1) * (each_s - prompt_token_s_);
  }
  const auto vocab = static_cast<size_t>(engine_->plan().vocab_size);
  for (Turn& turn : turns) {
    if (!turn.waits_for_logits) continue;
    const std::span<const float> row = logits.first(vocab);
    logits = logits.subspan(vocab);
    std::vector<int32_t>& guesses = turn.draft->tokens;
    guesses.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
    if (std::ssize(guesses) < turn.most) turn.pending = std::span(guesses).last(1);
  }
}

std::vector<Draft> ModelDrafter::propose_all(std::span<const DraftAsk> asks) {
  ++clock_;
  std::vector<Draft> drafts(asks.size());
  const Plan& plan = engine_->plan();
  for (const DraftAsk& ask : asks) {  // those of this step are not idle
    if (const auto known = texts_.find(ask.request); ask.most > 0 && known != texts_.end()) {
      known->second.used = clock_;
    }
  }
  std::vector<Turn> turns;
  for (size_t i = 0; i < asks.size(); ++i) {
    DraftAsk ask = asks[i];
    ask.most = std::min(ask.most, plan.limits.context - std::ssize(ask.tokens) + 1);
    const bool known = std::all_of(ask.tokens.begin(), ask.tokens.end(),
                                   [&](int32_t id) { return id >= 0 && id < plan.vocab_size; });
    if (ask.most < 1 || ask.tokens.empty() || !known) continue;
    Text* const text = text_of(ask);
    if (text == nullptr) continue;
    drafts[i].tokens.reserve(static_cast<size_t>(ask.most));  // what is pending lies in it
    turns.push_back({text, ask.tokens.subspan(text->held.size()), ask.most, &drafts[i]});
  }
  const auto goes_on = [](const Turn& turn) { return !turn.pending.empty(); };
  while (std::any_of(turns.begin(), turns.end(), goes_on)) step(turns);
  return drafts;
}

double ModelDrafter::seconds(std::span<const DraftAsk> asks) const {
  int64_t pending = 0, longest = 0;
  for (const DraftAsk& ask : asks) {
    if (ask.most < 1) continue;
    const auto known = texts_.find(ask.request);
    const int64_t held = known == texts_.end() ? 0 : std::ssize(known->second.held);
    pending += std::max<int64_t>(std::ssize(ask.tokens) - held, 1);
    longest = std::max(longest, ask.most);
  }
  double seconds = pending <= kPrompt ? price_.seconds(pending)
                                      : static_cast<double>(pending) * prompt_token_s_ / kSteps;
  for (int64_t guess = pending <= kPrompt ? 2 : 1; guess <= longest; ++guess) {
    seconds += price_.seconds(std::count_if(
        asks.begin(), asks.end(), [&](const DraftAsk& ask) { return ask.most >= guess; }));
  }
  return seconds;
}

std::shared_ptr<Drafter> model_drafter(std::shared_ptr<Engine> engine) {
  return std::make_shared<ModelDrafter>(std::move(engine));
}

}  // namespace helm
