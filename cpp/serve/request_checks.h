// Whether a request can be computed at all.
#pragma once

#include <string>

#include "helm/engine.h"
#include "helm/generation.h"

namespace helm {

// Throws kInvalid, or kCapacity for a prompt that is too long, with a message that begins with
// `where`. What concerns an open sequence, which only the engine's own thread may ask for, is
// check_sequence()'s.
void check_request(const Plan& plan, const Request& request, const std::string& where);
void check_sequence(const Engine& engine, const Request& request, const std::string& where);

}  // namespace helm
