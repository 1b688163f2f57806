// A file that is read past the page cache, again and again, while others may change it. Knows
// nothing of what files hold.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/file_identity.h"

namespace helm {

// What the system is asked for; tests make it fail.
class FileCalls {
 public:
  virtual ~FileCalls() = default;
  // As the system's, with -1 and errno.
  virtual int open(const char* path, int flags);
  virtual ssize_t read(int descriptor, void* to, size_t bytes, int64_t offset);
};
FileCalls& system_file_calls();

// Offsets, sizes and memory of reads are multiples of kDiskAlignment. For several threads.
class DirectFile {
 public:
  // Throws Error{kIo} for a file that cannot be opened.
  explicit DirectFile(std::string path, FileCalls& calls = system_file_calls());
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t bytes() const { return identity_.bytes; }
  const FileIdentity& identity() const { return identity_; }  // as it was opened
  // Whether reads go past the page cache. Where the file system refuses that they go through it,
  // and what they leave there is given up at once.
  bool direct() const { return direct_.load(); }
  // The file may end within what is read, but not within the first `needed` bytes: throws
  // Error{kIo} then, and where reading fails.
  void read(std::byte* to, int64_t bytes, int64_t needed, int64_t offset) const;
  // Throws Error{kIo} unless the path still names the file as it was opened.
  void check() const;

 private:
  void fall_back() const;

  std::string path_;
  FileCalls& calls_;
  int descriptor_ = -1;
  FileIdentity identity_;
  mutable std::atomic<bool> direct_{true};
};

}  // namespace helm
