#include "weights/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/check.h"

namespace helm {
namespace {

[[noreturn]] void fail_to_read(const std::string& path, int code) {
  fail(ErrorKind::kIo, "[load] cannot read ", path, ": ", std::strerror(code),
       "; give the folder that holds the model's weights");
}

[[noreturn]] void fail_changed(const std::string& path) {
  fail(ErrorKind::kIo, "[load] ", path, " changed while it was read; load it again when it is ",
       "complete");
}

}  // namespace

class WeightFiles::Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : number_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status{};
    if (number_ < 0 || fstat(number_, &status) != 0) {
      const int code = errno;
      if (number_ >= 0) close(number_);
      fail_to_read(path, code);
    }
    identity_ = FileIdentity::of(status);
  }
  ~Descriptor() { close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }
  const FileIdentity& identity() const { return identity_; }

 private:
  int number_;
  FileIdentity identity_;
};

WeightFile::WeightFile(WeightFiles& files, std::string path)
    : files_(files), path_(std::move(path)), identity_(WeightFiles::Descriptor(path_).identity()) {}

void WeightFile::read(void* to, int64_t bytes, int64_t offset) const {
  const auto file = files_.open(*this);
  auto* out = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(file->number(), out, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      fail(ErrorKind::kIo, "[load] reading ", path_, " at offset ", offset,
           " failed: ", got == 0 ? "unexpected end of file" : std::strerror(errno));
    }
    out += got;
    offset += got;
    bytes -= got;
  }
}

std::shared_ptr<MappedFile> WeightFile::map() const {
  std::shared_ptr<MappedFile> found = mapped_.lock();
  if (found == nullptr) {
    found = std::make_shared<MappedFile>(path_, files_.open(*this)->number(), identity_);
    mapped_ = found;
  }
  return found;
}

const WeightFile& WeightFiles::of(const std::string& name) {
  const auto known = files_.find(name);
  if (known != files_.end()) return known->second;
  if (directory_.empty()) {
    fail(ErrorKind::kInvalid, "[load] no folder was named; give the one that holds the model's ",
         "weights");
  }
  // Whole, as the process may change its directory while files are read or mapped.
  const std::string path = directory_ + "/" + name;
  std::error_code error;
  const std::string whole = std::filesystem::absolute(path, error).string();
  return files_.try_emplace(name, *this, error ? path : whole).first->second;
}

std::shared_ptr<const WeightFiles::Descriptor> WeightFiles::open(const WeightFile& file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& entry) { return entry.first == &file; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
  } else {
    if (open_.size() == kMostOpen) open_.pop_back();
    open_.emplace_front(&file, std::make_shared<Descriptor>(file.path_));
  }
  if (!open_.front().second->identity().same_content(file.identity_)) fail_changed(file.path_);
  return open_.front().second;
}

void WeightFiles::check() const {
  for (const auto& [name, file] : files_) {
    struct stat status{};
    if (stat(file.path_.c_str(), &status) != 0) fail_to_read(file.path_, errno);
    if (!FileIdentity::of(status).same_content(file.identity_)) fail_changed(file.path_);
  }
}

}  // namespace helm
