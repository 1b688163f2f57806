// A file of known bytes, a layout of units that lie in it, and what errors of reading it say.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "helm/types.h"
#include "plan/disk.h"

namespace helm::test {

inline std::byte content_at(int64_t offset) {
  return static_cast<std::byte>(offset * 31 + offset / 4096);
}

inline std::string write_file(const std::string& folder, int64_t bytes) {
  std::vector<std::byte> content;
  for (int64_t i = 0; i < bytes; ++i) content.push_back(content_at(i));
  const std::string path = folder + "/data";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(bytes));
  return path;
}

// Units of these bytes, one behind the other in the file. Each is read once the one before is used.
inline DiskLayout layout_of(const std::vector<int64_t>& sizes, int64_t ring) {
  DiskLayout layout;
  int64_t offset = 0, end = 0;
  for (const int64_t bytes : sizes) {
    DiskUnit unit{.unit = layout.units.size(), .bytes = bytes};
    unit.place = end + bytes > ring ? 0 : end;
    end = unit.place + bytes;
    unit.ranges.push_back({"data", offset, bytes, bytes, unit.place});
    offset += bytes;
    layout.step_bytes += bytes;
    layout.units.push_back(unit);
  }
  for (DiskUnit& unit : layout.units) unit.frees = 1;
  return layout;
}

std::string told(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kIo);
    return error.what();
  }
  return "nothing";
}

}  // namespace helm::test
