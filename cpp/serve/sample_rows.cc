#include "serve/sample_rows.h"

namespace helm {
namespace {

// A draw from fewer logits takes no longer than it takes to call the threads.
constexpr int64_t kLeastShared = 16'384;

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

void RowSampler::draw(std::span<SampledRow> rows) {
  const auto draw = [&](int64_t i, int thread) {
    SampledRow& row = rows[static_cast<size_t>(i)];
    try {
      row.draw = row.sampler->draw(row.logits, scratch_[static_cast<size_t>(thread)]);
    } catch (...) {
      row.failure = std::current_exception();
    }
  };
  if (shared_ && rows.size() > 1) {
    engine_.share(std::ssize(rows), draw);
  } else {
    for (int64_t i = 0; i < std::ssize(rows); ++i) draw(i, 0);
  }
}

}  // namespace helm
