// Weights on disk on their way through memory: threads read ahead of the steps, unit by unit, into
// a ring whose parts are free again once their unit was used. Copies of the files on other drives
// are read at once.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "device/lane_clock.h"
#include "plan/disk.h"
#include "weights/drive.h"

namespace helm {

class DiskRing {
 public:
  // Reads under way at once of each drive, and the bytes of one: what fills a drive.
  static constexpr int kDepth = 8;
  static constexpr int64_t kReadBytes = int64_t{1} << 20;

  // Begins to read. directories: where the plan's files lie, then those of copies. Each has threads
  // of its own, which take what is to be read next: so drives share by their rates. Throws
  // Error{kIo} for a file that cannot be opened, is too short or is no copy, Error{kMemory}.
  // most_bytes_per_s: that reads give together; 0: as the drives do.
  DiskRing(DiskLayout layout, int64_t ring_bytes, const std::vector<std::string>& directories,
           FileCalls& calls = system_file_calls(), double most_bytes_per_s = 0);
  ~DiskRing();
  DiskRing(const DiskRing&) = delete;
  DiskRing& operator=(const DiskRing&) = delete;

  const DiskLayout& layout() const { return layout_; }
  const std::byte* data() const { return ring_.data(); }
  int64_t bytes() const { return ring_.bytes(); }

  // The next unit, in the layout's order from step to step, waits until it is there, and gives its
  // memory back. Throws Error{kIo} where reading it failed; every later call throws then.
  void acquire(size_t unit);
  void release(size_t unit);

  // Bytes of a tensor on disk, aside. Throws Error{kIo}.
  void read_some(TensorIndex tensor, int64_t offset, int64_t bytes, std::byte* out) const;
  // Throws Error{kIo} where a file is not as it was.
  void check() const;
  bool direct() const;                      // see DirectFile
  std::vector<int64_t> read_bytes() const;  // so far, by drive
  int64_t used_bytes() const;               // of those, what steps have used

 private:
  struct Chunk {
    const std::string* file;  // of the layout
    int64_t place, offset, bytes, needed;
  };
  struct Unit {
    std::vector<Chunk> chunks;
    size_t begun = 0, done = 0;  // chunks of the read that is under way
  };

  void read_ahead(size_t drive);
  void end();
  void check_turn(size_t own, size_t unit) const;
  size_t count() const { return units_.size(); }

  DiskLayout layout_;
  Arena ring_;
  std::vector<Drive> drives_;
  const double most_bytes_per_s_;
  std::vector<Unit> units_;
  mutable std::mutex mutex_;  // of what follows, and of the units' progress
  std::condition_variable may_read_, loaded_;
  uint64_t reading_ = 0;  // reads of units before it are all begun, counted since the start
  uint64_t used_ = 0;     // those before it were used
  std::string failure_;   // empty: none
  bool ends_ = false;
  LaneClock clock_;                  // of the reads, as they begin
  std::vector<int64_t> read_bytes_;  // by drive
  int64_t used_bytes_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace helm
