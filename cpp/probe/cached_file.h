// A file that lies in the page cache and nowhere else, as weights do when a model is loaded again:
// what mapping them and copying them cost. Times nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helm::probe {

// In memory (memfd), because a file on a disk would make whoever probes wait for the disk and leave
// traces there. Its pages are small, like those of most file systems.
class CachedFile {
 public:
  // Throws Error{kMemory} when the system refuses.
  explicit CachedFile(int64_t bytes);
  ~CachedFile();
  CachedFile(const CachedFile&) = delete;
  CachedFile& operator=(const CachedFile&) = delete;

  int64_t bytes() const { return bytes_; }
  std::byte* data() const { return data_; }  // mapped, zero until written
  // Whether the system did it. Does not throw: pool threads call it.
  bool read(std::byte* to, int64_t bytes, int64_t offset) const;

 private:
  int64_t bytes_;
  int fd_;
  std::byte* data_ = nullptr;
};

}  // namespace helm::probe
