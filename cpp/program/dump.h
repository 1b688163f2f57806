// Programs as text, a line for each task: what tests compare, and people read.
#pragma once

#include <string>

#include "program/task.h"

namespace helm {

// Needs the plan that was lowered. Ends without a line break.
std::string text(const Plan& plan, const Program& program);

}  // namespace helm
