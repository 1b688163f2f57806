#include "weights/drive.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/arena.h"
#include "base/check.h"

namespace helm {

Drive::Drive(const DiskLayout& layout, const std::string& directory, FileCalls& calls) {
  for (const DiskUnit& unit : layout.units) {
    for (const DiskRange& range : unit.ranges) {
      std::unique_ptr<DirectFile>& file = files_[range.file];
      if (file == nullptr) {
        // Whole, as the process may change its directory.
        const std::string path = directory + "/" + range.file;
        std::error_code error;
        const std::string whole = std::filesystem::absolute(path, error).string();
        file = std::make_unique<DirectFile>(error ? path : whole, calls);
      }
      if (range.offset + range.needed > file->bytes()) {
        fail(ErrorKind::kIo, "[disk] ", file->path(), " has ", file->bytes(), " bytes, expected ",
             range.offset + range.needed, "; the checkpoint is incomplete");
      }
    }
  }
}

void Drive::check_copy(const Drive& original, const DiskLayout& layout) const {
  const auto refuse = [](const DirectFile& own, const DirectFile& other, const auto&... how) {
    fail(ErrorKind::kIo, "[disk] ", own.path(), " is no copy of ", other.path(), ": ", how...,
         "; copy the checkpoint again, or leave that copy out");
  };
  for (const auto& [name, own] : files_) {
    const DirectFile& other = original.file(name);
    if (own->identity().same_file(other.identity())) {
      refuse(*own, other, "they are the same file");
    }
    if (own->bytes() != other.bytes()) {
      refuse(*own, other, "it has ", own->bytes(), " bytes, not ", other.bytes());
    }
  }
  const Arena memory(2 * kDiskAlignment, "the comparison of copies");
  std::byte *mine = memory.data(), *theirs = mine + kDiskAlignment;
  for (const DiskUnit& unit : layout.units) {
    for (const DiskRange& range : unit.ranges) {
      const DirectFile &own = file(range.file), &other = original.file(range.file);
      for (const int64_t at : {int64_t{0}, range.bytes - kDiskAlignment}) {
        const int64_t bytes = std::min(kDiskAlignment, range.needed - at);
        own.read(mine, kDiskAlignment, bytes, range.offset + at);
        other.read(theirs, kDiskAlignment, bytes, range.offset + at);
        if (std::memcmp(mine, theirs, static_cast<size_t>(bytes)) != 0) {
          refuse(own, other, "their bytes from ", range.offset + at, " on differ");
        }
      }
    }
  }
}

void Drive::check() const {
  for (const auto& [name, file] : files_) file->check();
}

bool Drive::direct() const {
  return std::ranges::all_of(files_, [](const auto& one) { return one.second->direct(); });
}

}  // namespace helm
