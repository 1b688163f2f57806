#include "base/part_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/check.h"

namespace helm {
namespace {

constexpr std::string_view kRandom = "XXXXXX";  // as mkostemp wants them

bool is_part(const std::string& name) {
  const std::string_view marker = PartFile::kMarker;
  return name.starts_with(marker) && name.size() == marker.size() + kRandom.size();
}

// Removes a part whose writer is gone. Another user's, and what is no regular file, is not ours.
void sweep(const std::string& part) {
  struct stat named{};
  if (lstat(part.c_str(), &named) != 0 || !S_ISREG(named.st_mode) || named.st_uid != geteuid()) {
    return;
  }
  const Descriptor file(open(part.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat opened{};
  if (file.get() < 0 || fstat(file.get(), &opened) != 0 || opened.st_ino != named.st_ino) return;
  if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) unlink(part.c_str());
}

// One that cannot be listed may still be written to.
void sweep_folder(const std::filesystem::path& folder) {
  std::error_code failed;
  std::filesystem::directory_iterator entry(folder, failed);
  while (!failed && entry != std::filesystem::directory_iterator()) {
    if (is_part(entry->path().filename().string())) sweep(entry->path().string());
    entry.increment(failed);
  }
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

PartFile::PartFile(std::string target, std::string operation)
    : target_(std::move(target)), operation_(std::move(operation)) {
  std::filesystem::path folder = std::filesystem::path(target_).parent_path();
  if (folder.empty()) folder = ".";
  sweep_folder(folder);
  while (!create(folder)) {
  }
}

// False if another process swept the file before it was locked.
bool PartFile::create(const std::filesystem::path& folder) {
  part_ = (folder / kMarker).string().append(kRandom);
  const int descriptor = mkostemp(part_.data(), O_CLOEXEC);  // for its owner alone
  if (descriptor < 0) fail_with(errno);
  file_ = fdopen(descriptor, "wb");
  if (file_ == nullptr) {
    const int code = errno;
    close(descriptor);
    unlink(part_.c_str());
    fail_with(code);
  }
  // Where a file system has no locks, nobody gets one and nobody sweeps.
  const bool swept = flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  struct stat status{};
  if (!swept && fstat(descriptor, &status) == 0 && status.st_nlink > 0) return true;
  std::fclose(std::exchange(file_, nullptr));
  return false;
}

PartFile::~PartFile() {
  if (file_ == nullptr) return;
  unlink(part_.c_str());
  std::fclose(file_);
}

void PartFile::fail_with(int code) const {
  fail(ErrorKind::kIo, operation_, ": ", std::strerror(code));
}

void PartFile::write(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, file_) != bytes) fail_with(errno);
}

void PartFile::finish() {
  if (std::fflush(file_) != 0 || fsync(descriptor()) != 0 ||
      std::rename(part_.c_str(), target_.c_str()) != 0) {
    fail_with(errno);
  }
  if (std::fclose(std::exchange(file_, nullptr)) != 0) fail_with(errno);
}

}  // namespace helm
