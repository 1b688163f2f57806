#include "program/lower.h"

#include <algorithm>

#include "base/check.h"
#include "kv/cache.h"

namespace helm {
namespace {

using Far = Program::Far;
using Lane = Task::Lane;
using Verb = Task::Verb;

bool overflows(const Plan& plan) {
  return KvCache(plan, entry_devices(plan)).overflows();
}

}  // namespace

Plan with_partials(const Plan& plan) {
  Plan extended = plan;
  if (!overflows(plan)) return extended;
  int64_t width = 1;
  for (const UnitSpec& unit : plan.units) {
    const AttentionOp* op = attention_of(unit);
    if (op != nullptr) width = std::max(width, op->partial_width());
  }
  extended.values.push_back({"attention over near pages", width, false});
  extended.values.push_back({"attention over far pages", width, false});
  return extended;
}

std::vector<Program> lower(const Plan& plan) {
  const bool visits = plan.schedule.stream_tokens > 0;
  const bool on_cpu = plan.schedule.overflow == Schedule::Overflow::kCpu;
  std::vector<std::pair<bool, Far>> kinds{{false, Far::kNone}};
  if (visits) kinds.emplace_back(true, Far::kNone);
  if (overflows(plan)) {
    kinds.emplace_back(false, Far::kVisit);
    if (on_cpu) kinds.emplace_back(false, Far::kOnCpu);
    if (visits) kinds.emplace_back(true, Far::kVisit);
    // Only a step of single tokens has the CPU attend.
    if (visits && on_cpu && plan.schedule.stream_tokens <= plan.limits.sequences) {
      kinds.emplace_back(true, Far::kOnCpu);
    }
  }
  std::vector<Program> programs;
  for (const auto& [visiting, far] : kinds) {
    programs.push_back(Lowering(plan, visiting, far).program());
  }
  return programs;
}

Lowering::Lowering(const Plan& plan, bool visits, Far far)
    : plan_(plan),
      places_(visits ? visiting_units(plan) : resident_units(plan)),
      program_{visits, far, {}},
      last_run_(plan.devices.size(), -1) {}

Program Lowering::program() {
  for (const StageSpan& span : stages_of(plan_, places_)) stage(span);
  if (places_.back() != kCpu) copy(plan_.logits, places_.back(), kCpu);
  return std::move(program_);
}

Task& Lowering::add(Verb verb, Lane lane, DeviceIndex device, size_t begin, size_t end,
                    std::vector<int32_t> after) {
  return program_.tasks.emplace_back(
      Task{verb, lane, device, begin, end, 0, false, false, std::move(after)});
}

int32_t Lowering::run(Verb verb, DeviceIndex device, size_t begin, size_t end,
                      std::vector<int32_t> after) {
  after.insert(after.begin(), handed_.begin(), handed_.end());
  handed_.clear();
  add(verb, Lane::kDevice, device, begin, end, std::move(after));
  return last_run_[static_cast<size_t>(device)] = last();
}

int32_t Lowering::copy(ValueIndex value, DeviceIndex from, DeviceIndex to) {
  const bool up = to != kCpu;
  const int32_t writer = last_run_[static_cast<size_t>(from)];
  add(Verb::kCopy, up ? Lane::kUp : Lane::kDown, up ? to : from, 0, 0, {writer}).value = value;
  return last();
}

void Lowering::stage(const StageSpan& span) {
  for (const ValueIndex value : span.inputs) {
    handed_.push_back(copy(value, places_[span.begin - 1], span.device));
  }
  const auto lies_here = [&](size_t unit) { return plan_.units[unit].device == span.device; };
  const size_t before = layers_.size();
  for (size_t u = span.begin; u < span.end; u = layer_end(plan_, u)) {
    if (!lies_here(u)) layers_.emplace_back(u, layer_end(plan_, u));
  }
  if (before > 0 && layers_.size() > before) {
    fail(ErrorKind::kInvalid,
         "[plan] layers whose weights visit the accelerator must follow one another there; set "
         "schedule.prefill to \"compute\"");
  }
  if (before == 0) visit_next();
  for (size_t begin = span.begin; begin < span.end;) {
    size_t end = begin;
    while (end < span.end && lies_here(end)) ++end;
    if (end > begin) {
      resident(span.device, begin, end);
    } else {
      end = layer_end(plan_, begin);
      visiting_layer(begin, end);
    }
    begin = end;
  }
}

}  // namespace helm
