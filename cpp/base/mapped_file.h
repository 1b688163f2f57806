// A file mapped for reading that others may change meanwhile. What is lost of it reads as zeros and
// is told by check(), where the system would end the process. Knows nothing of what files hold.
#pragma once

#include <cstddef>
#include <string>

#include "base/file_identity.h"

namespace helm {

class MappedFile {
 public:
  // Maps all of an open file, which may be closed then. Throws Error{kIo}.
  MappedFile(std::string path, int descriptor, const FileIdentity& identity);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }

  // Throws Error{kIo} unless its path still names the file as it was mapped. `used`: it was read
  // since the last call. Where it may have been read as something else, every later call throws.
  void check(bool used) const;

  struct Region;

 private:
  std::string path_;
  FileIdentity identity_;
  std::byte* data_ = nullptr;
  Region* region_ = nullptr;
};

}  // namespace helm
