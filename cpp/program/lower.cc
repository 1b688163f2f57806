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

int64_t split_rows(const Plan& plan) {
  const Limits& limits = plan.limits;
  if (limits.sequences < 2 || plan.schedule.visit_tokens > 0 || !overflows(plan)) return 0;
  return std::min(limits.sequences, limits.step_tokens);
}

std::vector<Program> lower(const Plan& plan) {
  const bool visits = plan.schedule.visit_tokens > 0;
  const bool on_cpu = plan.schedule.overflow == Schedule::Overflow::kCpu;
  std::vector<std::pair<bool, Far>> kinds{{false, Far::kNone}};
  if (visits) kinds.emplace_back(true, Far::kNone);
  if (overflows(plan)) {
    for (const Far far : {Far::kVisit, Far::kOnCpu, Far::kBoth}) {
      if (far != Far::kVisit && !on_cpu) continue;
      kinds.emplace_back(false, far);
      if (visits) kinds.emplace_back(true, far);
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
      lacking_(lacking_units(plan)),
      disk_(disk_layout(plan)),
      program_{visits, far, false, {}},
      last_run_(plan.devices.size(), -1) {}

Program Lowering::program() {
  const std::vector<StageSpan> stages = stages_of(plan_, places_);
  std::vector<std::vector<std::pair<size_t, ValueIndex>>> sent(stages.size());  // to which stages
  for (size_t reader = 0; reader < stages.size(); ++reader) {
    for (const auto& [value, from] : stages[reader].inputs) sent[from].emplace_back(reader, value);
    program_.whole = program_.whole || stages[reader].resumes;
  }
  find_groups(stages);
  std::vector<std::vector<int32_t>> copies(stages.size());  // for each stage
  for (size_t s = 0; s < stages.size(); ++s) {
    handed_ = std::move(copies[s]);
    const bool first = visits_.empty() && !groups_.empty() && groups_[0].first < stages[s].end;
    for (int64_t i = 1; first && i < plan_.schedule.visit_buffers; ++i) visit_next();
    stage(stages[s]);
    for (const auto& [reader, value] : sent[s]) {
      copies[reader].push_back(copy(value, stages[s].device, stages[reader].device));
    }
  }
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
  for (size_t begin = span.begin, end = begin; begin < span.end; begin = end) {
    end = group_end(begin);
    if (end > begin) {
      visiting_group(begin, end);
      continue;
    }
    while (end < span.end && group_end(end) == end) ++end;
    resident(span.device, begin, end);
  }
}

}  // namespace helm
