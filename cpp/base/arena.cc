#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
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
    fail(ErrorKind::kMemory, "[memory] the system refused ", bytes_, " bytes for ", purpose,
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

std::optional<int64_t> Arena::huge_page_bytes() const {
  if (data_ == nullptr) return 0;
  const auto first = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t last = first + static_cast<uintptr_t>(bytes_);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool ours = false, told = false;
  int64_t found = 0;
  while (std::getline(smaps, line)) {
    unsigned long long begin = 0, end = 0;
    long long kib = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      ours = begin < last && first < end;
    } else if (ours && std::sscanf(line.c_str(), "AnonHugePages: %lld kB", &kib) == 1) {
      found += int64_t{kib} * 1024;
      told = true;
    }
  }
  if (!told) return std::nullopt;
  return std::min(found, bytes_);  // the kernel may list a neighbouring mapping as one with ours
}

}  // namespace helm
