#include "base/affinity.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace helm {

bool pin_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  return sched_setaffinity(0, sizeof(set), &set) == 0;
}

int current_node() {
  unsigned node = 0;
  return syscall(SYS_getcpu, nullptr, &node, nullptr) == 0 ? static_cast<int>(node) : 0;
}

}  // namespace helm
