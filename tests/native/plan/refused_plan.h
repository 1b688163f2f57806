// With which words a plan is refused.
#pragma once

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "helm/plan.h"

namespace helm::test {

using json = nlohmann::json;

inline std::string message_of(const json& plan) {
  try {
    helm::Plan::from_json(plan.dump());
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kInvalid);
    return error.what();
  }
  return "";
}

inline void expect(const json& plan, const std::string& part) {
  const std::string message = message_of(plan);
  CHECK_MESSAGE(message.find(part) != std::string::npos, "wanted " << part << " in: " << message);
}

}  // namespace helm::test
