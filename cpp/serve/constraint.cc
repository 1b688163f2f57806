#include "helm/constraint.h"

namespace helm {

TokenConstraint::~TokenConstraint() = default;
Grammar::~Grammar() = default;

}  // namespace helm
