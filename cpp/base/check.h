// Raising helm::Error with a formatted message.
#pragma once

#include <sstream>
#include <system_error>

#include "helm/types.h"

namespace helm {

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

// The system has refused one of `threads`, of which so many have started.
[[noreturn]] inline void fail_to_start(int started, int threads, const std::system_error& error) {
  fail(ErrorKind::kMemory, "[threads] the system starts ", started, " of ", threads,
       " threads: ", error.code().message(), "; use fewer, or raise its limits");
}

}  // namespace helm
