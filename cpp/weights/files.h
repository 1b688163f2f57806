// The files of one load: read by many threads with few descriptors open, and the same from the
// first byte to the last. Knows no tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/file_identity.h"
#include "base/mapped_file.h"

namespace helm {

class WeightFiles;

// Throws Error{kIo} where the file cannot be read, or is another than at first.
class WeightFile {
 public:
  WeightFile(WeightFiles& files, std::string path);

  const std::string& path() const { return path_; }
  int64_t bytes() const { return identity_.bytes; }
  void read(void* to, int64_t bytes, int64_t offset) const;
  // One mapping while anybody holds it. Not for several threads at once.
  std::shared_ptr<MappedFile> map() const;

 private:
  friend class WeightFiles;

  WeightFiles& files_;
  std::string path_;
  FileIdentity identity_;
  mutable std::weak_ptr<MappedFile> mapped_;
};

class WeightFiles {
 public:
  // Open at once, beside those that threads are reading: a process may have few, as 256 in all.
  static constexpr size_t kMostOpen = 32;

  explicit WeightFiles(std::string directory) : directory_(std::move(directory)) {}

  const WeightFile& of(const std::string& name);
  // Throws Error{kIo} if one has changed since it was first opened. Not by inodes: some network
  // file systems give a file that nobody holds open another one.
  void check() const;

 private:
  friend class WeightFile;
  class Descriptor;

  // Open until nobody holds it and others were used since.
  std::shared_ptr<const Descriptor> open(const WeightFile& file);

  std::string directory_;
  std::map<std::string, WeightFile> files_;  // by name
  std::mutex mutex_;                         // of what follows
  std::list<std::pair<const WeightFile*, std::shared_ptr<const Descriptor>>> open_;  // latest first
};

}  // namespace helm
