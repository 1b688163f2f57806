// Large anonymous memory on huge pages. Knows nothing of what is placed in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace helm {

// One mapping, zero-filled, touched lazily by whoever writes first. Unmapped on destruction.
class Arena {
 public:
  Arena() = default;
  // Throws Error{kMemory} when the system refuses; `purpose` appears in the message.
  Arena(int64_t bytes, const char* purpose);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::span<const std::byte> memory() const { return {data_, static_cast<size_t>(bytes_)}; }
  bool huge_pages() const { return huge_pages_; }  // the request for huge pages was accepted
  // How much of it lies on huge pages now, as the system counts them; nothing where it does not
  // tell. Walks the tables of the whole process: milliseconds.
  std::optional<int64_t> huge_page_bytes() const;

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  bool huge_pages_ = false;
};

// Rounds up to a multiple of `alignment`, a power of two.
constexpr int64_t align_up(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) & ~(alignment - 1);
}

// Cache line: no two threads write to one line, and no vector load of a row start splits two.
inline constexpr int64_t kCacheLine = 64;

}  // namespace helm
