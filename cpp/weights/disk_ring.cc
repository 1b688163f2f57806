#include "weights/disk_ring.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace helm {

DiskRing::DiskRing(DiskLayout layout, int64_t ring_bytes,
                   const std::vector<std::string>& directories, FileCalls& calls,
                   double most_bytes_per_s)
    : layout_(std::move(layout)),
      ring_(ring_bytes, "weights read from disk"),
      most_bytes_per_s_(most_bytes_per_s),
      read_bytes_(directories.size()) {
  for (const std::string& directory : directories) {
    Drive drive(layout_, directory, calls);
    for (const Drive& before : drives_) drive.check_copy(before, layout_);
    drives_.push_back(std::move(drive));
  }
  for (const DiskUnit& unit : layout_.units) {
    Unit& own = units_.emplace_back();
    for (const DiskRange& range : unit.ranges) {
      for (int64_t at = 0; at < range.bytes; at += kReadBytes) {
        const int64_t bytes = std::min(kReadBytes, range.bytes - at);
        const int64_t needed = std::min(bytes, range.needed - at);
        own.chunks.push_back({&range.file, range.place + at, range.offset + at, bytes, needed});
      }
    }
  }
  const size_t most = kDepth * drives_.size();
  try {
    while (threads_.size() < most) {
      threads_.emplace_back(
          [this, drive = threads_.size() % drives_.size()] { read_ahead(drive); });
    }
  } catch (const std::system_error& error) {
    const int started = static_cast<int>(threads_.size());
    end();
    fail_to_start(started, static_cast<int>(most), error);
  }
}

DiskRing::~DiskRing() {
  end();
}

void DiskRing::end() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  may_read_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DiskRing::read_ahead(size_t drive) {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto may_begin = [&] {
      const DiskUnit& next = layout_.units[reading_ % count()];
      return used_ + next.frees > reading_ && failure_.empty();
    };
    may_read_.wait(lock, [&] { return ends_ || may_begin(); });
    if (ends_) return;
    Unit& unit = units_[reading_ % count()];
    const Chunk& chunk = unit.chunks[unit.begun++];
    if (unit.begun == unit.chunks.size()) ++reading_;
    const LaneSeconds least = time_at(most_bytes_per_s_, chunk.bytes);
    const LaneTime end = clock_.take(std::chrono::steady_clock::now(), least);
    lock.unlock();
    std::string failure;
    try {
      const DirectFile& file = drives_[drive].file(*chunk.file);
      file.read(ring_.data() + chunk.place, chunk.bytes, chunk.needed, chunk.offset);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    sleep_until(end);
    lock.lock();
    read_bytes_[drive] += chunk.bytes;
    if (!failure.empty() && failure_.empty()) failure_ = failure;
    if (++unit.done == unit.chunks.size() || !failure_.empty()) loaded_.notify_all();
  }
}

void DiskRing::acquire(size_t unit) {
  std::unique_lock lock(mutex_);
  const size_t own = used_ % count();
  check_turn(own, unit);
  loaded_.wait(lock,
               [&] { return units_[own].done == units_[own].chunks.size() || !failure_.empty(); });
  if (!failure_.empty()) fail(ErrorKind::kIo, failure_);
}

void DiskRing::release(size_t unit) {
  {
    const std::lock_guard lock(mutex_);
    const size_t own = used_ % count();
    check_turn(own, unit);
    units_[own].begun = units_[own].done = 0;
    used_bytes_ += layout_.units[own].bytes;
    ++used_;
  }
  may_read_.notify_all();
}

// Steps run all units in order.
void DiskRing::check_turn(size_t own, size_t unit) const {
  if (layout_.units[own].unit == unit) return;
  fail(ErrorKind::kDevice, "[disk] unit ", unit, " was asked for, unit ", layout_.units[own].unit,
       " is next; load the model anew");
}

void DiskRing::read_some(TensorIndex tensor, int64_t offset, int64_t bytes, std::byte* out) const {
  for (const DiskUnit& unit : layout_.units) {
    for (const auto& [index, place] : unit.tensors) {
      if (index != tensor) continue;
      const auto range = std::ranges::find_if(unit.ranges, [&](const DiskRange& one) {
        return one.place <= place && place < one.place + one.bytes;
      });
      const int64_t begin = range->offset + place - range->place + offset;
      const int64_t first = begin / kDiskAlignment * kDiskAlignment;
      const int64_t size = align_up(begin + bytes - first, kDiskAlignment);
      const Arena memory(size, "weights read from disk");
      drives_.front().file(range->file).read(memory.data(), size, begin + bytes - first, first);
      std::memcpy(out, memory.data() + begin - first, static_cast<size_t>(bytes));
      return;
    }
  }
}

void DiskRing::check() const {
  for (const Drive& drive : drives_) drive.check();
}

bool DiskRing::direct() const {
  return std::ranges::all_of(drives_, &Drive::direct);
}

std::vector<int64_t> DiskRing::read_bytes() const {
  const std::lock_guard lock(mutex_);
  return read_bytes_;
}

int64_t DiskRing::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace helm
