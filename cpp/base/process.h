// The process that an object belongs to. A forked child has a copy of the object, but none of its
// threads, and locks that these held stay locked.
#pragma once

#include <unistd.h>

#include "base/check.h"

namespace helm {

class Process {
 public:
  bool here() const { return id_ == getpid(); }

  // Throws Error{kInvalid} in a child. `what` and `remedy` say what was made, and what to do there.
  void check(const char* what, const char* remedy) const {
    if (here()) return;
    fail(ErrorKind::kInvalid, what, " in process ", id_, ", of which this one, ", getpid(),
         ", is a forked child without its threads; ", remedy);
  }

 private:
  pid_t id_ = getpid();
};

}  // namespace helm
