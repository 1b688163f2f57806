// The files of one folder that a layout reads from: the checkpoint's own, or a copy of them on
// another drive. Reads nothing ahead.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "plan/disk.h"
#include "weights/direct_file.h"

namespace helm {

class Drive {
 public:
  // Throws Error{kIo} for a file that cannot be opened or is too short.
  Drive(const DiskLayout& layout, const std::string& directory, FileCalls& calls);

  const DirectFile& file(const std::string& name) const { return *files_.at(name); }
  // Throws Error{kIo} unless its files are others than those of `original`, as long, and with the
  // same bytes where what is read begins and ends.
  void check_copy(const Drive& original, const DiskLayout& layout) const;
  // Throws Error{kIo} where a file is not as it was.
  void check() const;
  bool direct() const;  // see DirectFile

 private:
  std::map<std::string, std::unique_ptr<DirectFile>> files_;
};

}  // namespace helm
