// Raising helm::Error with a formatted message.
#pragma once

#include <sstream>

#include "helm/types.h"

namespace helm {

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

}  // namespace helm
