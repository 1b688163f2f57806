// What tells a file from another one, or from itself after a change.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace helm {

struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t bytes = 0;
  int64_t modified_s = 0;
  int64_t modified_ns = 0;

  static FileIdentity of(const struct stat& status) {
    return {status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
            status.st_mtim.tv_nsec};
  }
  bool same_file(const FileIdentity& other) const {
    return device == other.device && inode == other.inode;
  }
  // As far as size and time tell.
  bool same_content(const FileIdentity& other) const {
    return bytes == other.bytes && modified_s == other.modified_s &&
           modified_ns == other.modified_ns;
  }
  bool operator==(const FileIdentity&) const = default;

  // What became of this file, of which `now` is found at its path, or errno `code`; empty: nothing.
  std::string change(int code, const FileIdentity& now) const {
    if (code != 0) return std::string("is gone: ") + std::strerror(code);
    if (!now.same_file(*this)) return "was replaced by another file";
    if (now.bytes != bytes) {
      return "has " + std::to_string(now.bytes) + " bytes, not " + std::to_string(bytes);
    }
    return now == *this ? "" : "was written to";
  }
};

}  // namespace helm
