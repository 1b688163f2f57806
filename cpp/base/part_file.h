// A file that appears whole or not at all: written under another name in the same folder, and
// renamed at the end. What a process left that was killed meanwhile is removed by the next one that
// writes to the folder. Knows nothing of what is in a file.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

namespace helm {

// Of an open file; closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Parts are regular files named kMarker and six characters, locked (flock) as long as their writer
// lives. One of this user's that nobody locks is nobody's: its writer was killed.
class PartFile {
 public:
  static constexpr const char* kMarker = ".helm.part.";

  // Of `target`, whose links the caller has followed; readable by its owner alone. Failures of any
  // call are Error{kIo} that begins with `operation`.
  PartFile(std::string target, std::string operation);
  ~PartFile();
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  int descriptor() const { return fileno(file_); }
  void write(const void* data, size_t bytes);
  // Puts it in the target's place, on the disk.
  void finish();

 private:
  bool create(const std::filesystem::path& folder);
  [[noreturn]] void fail_with(int code) const;

  std::string target_;
  std::string operation_;
  std::string part_;
  std::FILE* file_ = nullptr;
};

}  // namespace helm
