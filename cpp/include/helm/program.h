// What steps of a plan do, as text.
#pragma once

#include <string>
#include <vector>

#include "helm/plan.h"

namespace helm {

// A text for each kind of step that the plan can have: a line that names the kind, then one for
// each task in the order in which it is enqueued. Throws Error{kInvalid} for a plan whose layers
// cannot visit the accelerator as it says.
HELM_API std::vector<std::string> programs(const Plan& plan);

}  // namespace helm
