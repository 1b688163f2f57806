#include "weights/direct_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "plan/disk.h"

namespace helm {

int FileCalls::open(const char* path, int flags) {
  return ::open(path, flags);
}

ssize_t FileCalls::read(int descriptor, void* to, size_t bytes, int64_t offset) {
  return pread(descriptor, to, bytes, offset);
}

FileCalls& system_file_calls() {
  static FileCalls calls;
  return calls;
}

DirectFile::DirectFile(std::string path, FileCalls& calls) : path_(std::move(path)), calls_(calls) {
  descriptor_ = calls_.open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (descriptor_ < 0 && errno == EINVAL) {
    direct_ = false;
    descriptor_ = calls_.open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  }
  struct stat status{};
  if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) {
    const int code = errno;
    if (descriptor_ >= 0) close(descriptor_);
    fail(ErrorKind::kIo, "[disk] cannot open ", path_, ": ", std::strerror(code),
         "; give the folder that holds the model's weights");
  }
  identity_ = FileIdentity::of(status);
}

DirectFile::~DirectFile() {
  close(descriptor_);
}

// Several threads may come here; the last call changes nothing.
void DirectFile::fall_back() const {
  direct_ = false;
  const int flags = fcntl(descriptor_, F_GETFL);
  if (flags >= 0) fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT);
}

void DirectFile::read(std::byte* to, int64_t bytes, int64_t needed, int64_t offset) const {
  int64_t done = 0;
  while (done < needed) {
    // Past the end of a file, and behind a short read, a direct read must still begin aligned.
    const int64_t begin = done / kDiskAlignment * kDiskAlignment;
    const ssize_t got =
        calls_.read(descriptor_, to + begin, static_cast<size_t>(bytes - begin), offset + begin);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && direct_.load()) {
      fall_back();
      continue;
    }
    if (got <= 0 || begin + got <= done) {
      fail(ErrorKind::kIo, "[disk] reading ", path_, " at offset ", offset + begin,
           " failed: ", got < 0 ? std::strerror(errno) : "unexpected end of file",
           "; check the disk and load the model anew");
    }
    done = begin + got;
  }
  if (!direct_.load()) posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_DONTNEED);
}

void DirectFile::check() const {
  struct stat status{};
  const int code = stat(path_.c_str(), &status) == 0 ? 0 : errno;
  const FileIdentity now = code == 0 ? FileIdentity::of(status) : FileIdentity{};
  const std::string how = identity_.change(code, now);
  if (how.empty()) return;
  fail(ErrorKind::kIo, "[disk] ", path_, " ", how,
       " since the model was loaded; restore it and load the model anew");
}

}  // namespace helm
