#include "serve/sample_rows.h"

#include <algorithm>

namespace helm {
namespace {

// A draw from fewer logits takes no longer than it takes to call the threads.
constexpr int64_t kLeastShared = 16'384;

// Draws until a token comes that was not guessed.
void draw_from(SampledRows& rows, Sampler::Scratch& scratch) {
  const size_t vocab = rows.logits.size() / (rows.guesses.size() + 1);
  const auto guessed = [&](int32_t id) {
    const auto at = static_cast<size_t>(rows.accepted);
    if (at == rows.guesses.size() || rows.guesses[at] != id) return false;
    ++rows.accepted;
    return true;
  };
  for (bool goes_on = true; goes_on;) {
    const auto row = static_cast<size_t>(rows.accepted);
    rows.draws.push_back(rows.sampler->draw(rows.logits.subspan(vocab * row, vocab), scratch));
    const Sampler::Draw& drawn = rows.draws.back();
    goes_on = guessed(drawn.id) && std::all_of(drawn.forced.begin(), drawn.forced.end(), guessed) &&
              !rows.sampler->stopped();
  }
}

}  // namespace

RowSampler::RowSampler(Engine& engine)
    : engine_(engine),
      shared_(engine.plan().vocab_size >= kLeastShared),
      scratch_(static_cast<size_t>(engine.stats().threads)) {}

void RowSampler::prepare(std::span<Sampler* const> samplers) {
  std::vector<Sampler*> constrained;
  for (Sampler* const sampler : samplers) {
    if (sampler->constrained()) constrained.push_back(sampler);
  }
  if (constrained.size() < 2) {
    for (Sampler* const sampler : constrained) sampler->prepare();
    return;
  }
  engine_.share(static_cast<int64_t>(constrained.size()),
                [&](int64_t i, int) { constrained[static_cast<size_t>(i)]->prepare(); });
}

void RowSampler::draw(std::span<SampledRows> requests) {
  const auto draw = [&](int64_t i, int thread) {
    SampledRows& rows = requests[static_cast<size_t>(i)];
    try {
      draw_from(rows, scratch_[static_cast<size_t>(thread)]);
    } catch (...) {
      rows.failure = std::current_exception();
    }
  };
  if (shared_ && requests.size() > 1) {
    engine_.share(std::ssize(requests), draw);
  } else {
    for (int64_t i = 0; i < std::ssize(requests); ++i) draw(i, 0);
  }
}

}  // namespace helm
