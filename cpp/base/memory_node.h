// Memory on one node of the machine. Knows not what is placed in it.
#pragma once

#include <cstdint>
#include <functional>

namespace helm {

inline constexpr int kAnyNode = -1;
inline constexpr int kMostNodes = 1024;

// bind(memory, bytes, node): whole pages that nobody has touched are to come from that node alone.
// Returns 0 or an errno.
using BindMemory = std::function<int(void* memory, int64_t bytes, int node)>;

int bind_memory(void* memory, int64_t bytes, int node);  // the system's

}  // namespace helm
