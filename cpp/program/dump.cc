#include "program/dump.h"

#include "helm/program.h"
#include "plan/stages.h"
#include "program/lower.h"

namespace helm {
namespace {

using Verb = Task::Verb;

// Around what a task is about, by verb.
constexpr const char* kWords[][2] = {{"run ", ""},      {"run ", " before"},  {"run ", " near"},
                                     {"run ", " far"},  {"run ", " after"},   {"copy ", ""},
                                     {"visit ", ""},    {"page ", " cached"}, {"page ", " written"},
                                     {"page ", " far"}, {"read ", ""}};

std::string subject(const Plan& plan, const Task& task) {
  const auto device = [&](bool cpu) {
    return plan.devices[static_cast<size_t>(cpu ? kCpu : task.device)].name;
  };
  if (task.verb == Verb::kCopy) {
    const bool up = task.lane == Task::Lane::kUp;
    const std::string& value = plan.values[static_cast<size_t>(task.value)].name;
    return value + " " + device(up) + ">" + device(!up);
  }
  const UnitSpec& first = plan.units[task.begin];
  const bool whole = task.begin == layer_begin(plan, task.begin) &&
                     task.end == layer_end(plan, task.begin) && !lacking_units(plan)[task.begin];
  const bool unit =
      task.verb == Verb::kRun || task.verb == Verb::kRead || (task.verb == Verb::kVisit && !whole);
  if (!unit) return "layer." + std::to_string(first.layer);
  const bool several = task.end - task.begin > 1;
  return first.name + (several ? ".." + plan.units[task.end - 1].name : "");
}

}  // namespace

std::string text(const Plan& plan, const Program& program) {
  const char* const far[] = {"", ", far pages visit", ", far pages on cpu",
                             ", far pages visit and on cpu"};
  std::string lines = program.visits ? "program visit" : "program rest";
  lines += far[static_cast<size_t>(program.far)];
  for (size_t i = 0; i < program.tasks.size(); ++i) {
    const Task& task = program.tasks[i];
    const std::string lanes[] = {plan.devices[static_cast<size_t>(task.device)].name, "up", "down",
                                 "disk"};
    const auto& [verb, part] = kWords[static_cast<size_t>(task.verb)];
    lines.append("\n").append(std::to_string(i)).append(" ");
    lines.append(lanes[static_cast<size_t>(task.lane)]).append(" ").append(verb);
    lines.append(subject(plan, task)).append(part);
    if (task.each) lines += ", each";
    if (task.aside) lines += " aside";
    if (!task.after.empty()) lines += " after";
    for (const int32_t other : task.after) lines.append(" ").append(std::to_string(other));
  }
  return lines;
}

std::vector<std::string> programs(const Plan& plan) {
  const Plan extended = with_partials(plan);
  std::vector<std::string> texts;
  for (const Program& program : lower(extended)) texts.push_back(text(extended, program));
  return texts;
}

}  // namespace helm
