// Layers that lie in host memory and are run by a device: weights a layer ahead, pages with it.
#include "program/lower.h"

namespace helm {

namespace {
using Lane = Task::Lane;
using Verb = Task::Verb;
}  // namespace

// The next layer's weights, if there is one: into the buffer that the one two before it has read.
void Lowering::visit_next() {
  const size_t i = visits_.size();
  if (i == layers_.size()) return;
  const auto& [begin, end] = layers_[i];
  std::vector<int32_t> after;
  if (i >= 2) after.push_back(visiting_runs_[i - 2]);
  add(Verb::kVisit, Lane::kUp, places_[begin], begin, end, std::move(after)).aside = true;
  visits_.push_back(last());
}

void Lowering::visiting_layer(size_t begin, size_t end) {
  const DeviceIndex device = places_[begin];
  const int32_t loaded = visits_.back();
  add(Verb::kCached, Lane::kUp, device, begin, end);
  visiting_runs_.push_back(run(Verb::kRun, device, begin, end, {loaded, last()}));
  // Before the pages go back: copies to memory that is not page-locked may hold up the host.
  visit_next();
  add(Verb::kWritten, Lane::kDown, device, begin, end, {visiting_runs_.back()});
}

}  // namespace helm
