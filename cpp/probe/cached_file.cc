#include "probe/cached_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace helm::probe {

CachedFile::CachedFile(int64_t bytes)
    : bytes_(bytes), fd_(memfd_create("helm-probe", MFD_CLOEXEC)) {
  void* base = MAP_FAILED;
  if (fd_ >= 0 && ftruncate(fd_, bytes) == 0) {
    base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  if (base == MAP_FAILED) {
    const int code = errno;
    if (fd_ >= 0) close(fd_);
    fail(ErrorKind::kMemory, "[probe] cannot make a file of ", bytes,
         " bytes in memory: ", std::strerror(code), "; free memory or raise the limit");
  }
#ifdef MADV_NOHUGEPAGE
  madvise(base, static_cast<size_t>(bytes), MADV_NOHUGEPAGE);
#endif
  data_ = static_cast<std::byte*>(base);
}

CachedFile::~CachedFile() {
  munmap(data_, static_cast<size_t>(bytes_));
  close(fd_);
}

bool CachedFile::read(std::byte* to, int64_t bytes, int64_t offset) const {
  while (bytes > 0) {
    const ssize_t got = pread(fd_, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    offset += got;
    bytes -= got;
  }
  return true;
}

}  // namespace helm::probe
