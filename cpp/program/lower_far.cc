// Layers of a device some of whose KV pages lie in host memory: attention in two places, merged.
#include <algorithm>
#include <utility>

#include "program/lower.h"

namespace helm {

namespace {
using Lane = Task::Lane;
using Verb = Task::Verb;
}  // namespace

// Units that lie on the device that runs them.
void Lowering::resident(DeviceIndex device, size_t begin, size_t end) {
  if (device == kCpu) {
    run_reading(begin, end);
    return;
  }
  if (program_.far == Program::Far::kNone) {
    run(Verb::kRun, device, begin, end);
    return;
  }
  const auto attends = [&](size_t unit) { return attention_of(plan_.units[unit]) != nullptr; };
  for (size_t next = begin; begin < end; begin = next) {
    const bool spread = attends(begin);
    const size_t last = spread ? std::min(end, layer_end(plan_, begin)) : end;
    for (++next; next < last && !attends(next);) ++next;
    if (spread) {
      spread_layer(device, begin, next);
    } else {
      run(Verb::kRun, device, begin, next);
    }
  }
}

void Lowering::spread_layer(DeviceIndex device, size_t begin, size_t end) {
  const int32_t before = run(Verb::kBefore, device, begin, end);
  if (program_.cpu_attends()) {
    Task& down = add(Verb::kCopy, Lane::kDown, device, begin, end, {before});
    down.value = attention_of(plan_.units[begin])->in;
    down.aside = true;
  }
  const int32_t query = last();
  if (program_.pages_visit()) {
    Task& page = add(Verb::kPage, Lane::kUp, device, begin, end);
    page.aside = page.each = true;
    run(Verb::kFar, device, begin, end, {last()});
    program_.tasks.back().each = true;
  }
  run(Verb::kNear, device, begin, end);
  std::vector<int32_t> partial;
  if (program_.cpu_attends()) {
    const int32_t far = run(Verb::kFar, kCpu, begin, end, {query});
    Task& up = add(Verb::kCopy, Lane::kUp, device, begin, end, {far});
    up.value = static_cast<ValueIndex>(plan_.values.size() - 1);
    partial.push_back(last());
  }
  run(Verb::kAfter, device, begin, end, std::move(partial));
}

}  // namespace helm
