#include "base/arena.h"

#include <sys/mman.h>

#include <utility>

#include "base/check.h"

namespace helm {
namespace {

// x86-64 and most arm64 kernels: transparent huge pages are 2 MiB. Below one page asking is moot.
constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

Arena::Arena(int64_t bytes, const char* purpose) {
  if (bytes <= 0) return;
  // Over-map by one huge page so that the usable part starts on a huge-page boundary.
  const bool huge = bytes >= kHugePage;
  bytes_ = huge ? align_up(bytes, kHugePage) : align_up(bytes, 4096);
  const int64_t mapped = bytes_ + (huge ? kHugePage : 0);
  void* base = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    fail(ErrorKind::kMemory, "the system refused ", bytes_, " bytes for ", purpose,
         "; close other programs or choose a smaller model or context");
  }
  auto* start = static_cast<std::byte*>(base);
  data_ = start;
  if (huge) {
    const auto address = reinterpret_cast<int64_t>(start);
    data_ = start + (align_up(address, kHugePage) - address);
    const int64_t head = data_ - start;
    if (head > 0) munmap(start, static_cast<size_t>(head));
    if (kHugePage - head > 0) munmap(data_ + bytes_, static_cast<size_t>(kHugePage - head));
    huge_pages_ = madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE) == 0;
  }
}

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      huge_pages_(std::exchange(other.huge_pages_, false)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(huge_pages_, other.huge_pages_);
  return *this;
}

}  // namespace helm
