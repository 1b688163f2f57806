#include "device/pinned_memory.h"

#include <unistd.h>

#include <algorithm>

namespace helm {

PinnedMemory::~PinnedMemory() {
  for (const std::byte* memory : locked_) device_.unpin(memory);
}

void PinnedMemory::lock(std::vector<std::span<const std::byte>> stretches, bool written) {
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto page_of = [&](const std::byte* p) {
    return reinterpret_cast<uintptr_t>(p) / page_bytes;
  };
  std::erase_if(stretches, [](const auto& stretch) { return stretch.empty(); });
  std::ranges::sort(stretches, {}, [](const auto& stretch) { return stretch.data(); });
  locked_.reserve(locked_.size() + stretches.size());
  for (size_t i = 0; i < stretches.size();) {
    const std::byte* const begin = stretches[i].data();
    const std::byte* end = begin + stretches[i].size();
    for (++i; i < stretches.size() && page_of(stretches[i].data()) <= page_of(end - 1); ++i) {
      end = std::max(end, stretches[i].data() + stretches[i].size());
    }
    if (device_.pin(begin, end - begin, written)) {
      locked_.push_back(begin);
    } else {
      refused_bytes_ += end - begin;
    }
  }
}

}  // namespace helm
