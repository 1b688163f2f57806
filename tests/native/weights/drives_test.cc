// Several drives with the same files: who reads how much, what is no copy, and drives that fail.
#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disk_files.h"
#include "tiny_model.h"
#include "weights/disk_ring.h"

namespace {

using helm::DiskLayout;
using helm::DiskRing;
using helm::DiskUnit;
using helm::test::content_at;
using helm::test::layout_of;
using helm::test::logits_of;
using helm::test::TinyFolder;
using helm::test::told;
using helm::test::write_file;
using Clock = std::chrono::steady_clock;

// Drives of one file each, by their folders.
class Drives final : public helm::FileCalls {
 public:
  struct Drive {
    double bytes_per_s = 0;       // 0: as fast as may be
    bool fails = false;           // from now on
    bool refuses_direct = false;  // reads
    Clock::time_point free = {};  // from when it may read again
  };
  Drive& of(const std::string& folder) { return drives_[folder]; }  // before it is read

  int open(const char* path, int flags) override {
    // Not every folder for temporary files takes O_DIRECT.
    const int descriptor = FileCalls::open(path, flags & ~O_DIRECT);
    if (descriptor < 0) return descriptor;
    const std::lock_guard lock(mutex_);
    opened_[descriptor] = &drives_[std::filesystem::path(path).parent_path().string()];
    return descriptor;
  }
  ssize_t read(int descriptor, void* to, size_t bytes, int64_t offset) override {
    Clock::time_point until = {};
    {
      const std::lock_guard lock(mutex_);
      Drive& own = *opened_.at(descriptor);
      const bool refused = own.refuses_direct;
      own.refuses_direct = false;
      if (own.fails || refused) {
        errno = refused ? EINVAL : EIO;
        return -1;
      }
      if (own.bytes_per_s > 0) {
        const std::chrono::duration<double> takes(static_cast<double>(bytes) / own.bytes_per_s);
        own.free =
            std::max(own.free, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
        until = own.free;
      }
    }
    std::this_thread::sleep_until(until);
    return FileCalls::read(descriptor, to, bytes, offset);
  }
  void fail(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    drives_[folder].fails = true;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Drive> drives_;
  std::map<int, Drive*> opened_;
};

constexpr int64_t kBytes = 64 << 10;  // of a unit

// All units lie in the ring at once, so that each may be read once it was used a step before.
DiskLayout layout_in_whole(int64_t units, int64_t bytes) {
  const auto count = static_cast<size_t>(units);
  DiskLayout layout = layout_of(std::vector<int64_t>(count, bytes), units * bytes);
  for (DiskUnit& unit : layout.units) unit.frees = count;
  return layout;
}

// Uses all units; how many bytes are others than the file's.
int64_t step(DiskRing& ring) {
  int64_t wrong = 0;
  for (const DiskUnit& unit : ring.layout().units) {
    ring.acquire(unit.unit);
    for (int64_t i = 0; i < unit.bytes; i += 512) {
      wrong += ring.data()[unit.place + i] != content_at(unit.ranges[0].offset + i);
    }
    ring.release(unit.unit);
  }
  return wrong;
}

int64_t sum(const std::vector<int64_t>& all) {
  int64_t total = 0;
  for (const int64_t each : all) total += each;
  return total;
}

}  // namespace

TEST_CASE("drives share the reads by their rates, and together take as long as the sum says") {
  constexpr int64_t kUnits = 60;
  constexpr double kRate = 64 << 20;
  const TinyFolder folders[2];
  Drives calls;
  for (const TinyFolder& folder : folders) write_file(folder.path(), kUnits * kBytes);
  calls.of(folders[0].path()).bytes_per_s = kRate;
  calls.of(folders[1].path()).bytes_per_s = kRate / 2;
  DiskRing ring(layout_in_whole(kUnits, kBytes), kUnits * kBytes,
                {folders[0].path(), folders[1].path()}, calls);
  CHECK(step(ring) == 0);
  const std::vector<int64_t> before = ring.read_bytes();
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < 10; ++i) CHECK(step(ring) == 0);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const std::vector<int64_t> after = ring.read_bytes();
  const double all = static_cast<double>(sum(after) - sum(before));
  const double share = static_cast<double>(after[0] - before[0]) / all;
  CHECK(share == doctest::Approx(2.0 / 3).epsilon(0.04));  // the same time for both
  CHECK(all / seconds > 0.8 * 1.5 * kRate);
  CHECK(all / seconds < 1.1 * 1.5 * kRate);
}

TEST_CASE("a drive that refuses O_DIRECT goes through the page cache, and the ring says so") {
  for (const bool refuses : {false, true}) {
    const TinyFolder folders[2];
    Drives calls;
    for (const TinyFolder& folder : folders) write_file(folder.path(), 6 * kBytes);
    calls.of(folders[1].path()).refuses_direct = refuses;
    DiskRing ring(layout_in_whole(6, kBytes), 6 * kBytes, {folders[0].path(), folders[1].path()},
                  calls);
    CHECK(step(ring) == 0);
    CHECK(ring.direct() == !refuses);
  }
}

TEST_CASE("what is no copy of the checkpoint's drive is refused by name") {
  const TinyFolder own, other;
  const int64_t bytes = 40'000;
  const std::string file = write_file(own.path(), bytes), copy = write_file(other.path(), bytes);
  Drives calls;
  // Units end within a block, as tensors do.
  DiskLayout layout = layout_of({20'480, 20'480}, 40'960);
  layout.units[1].ranges[0].needed = 19'520;
  std::string folder = other.path();
  const auto made = [&] { DiskRing(layout, 40'960, {own.path(), folder}, calls); };
  CHECK(told(made) == "nothing");
  const std::string refused = "[disk] " + copy + " is no copy of " + file + ": ";
  const auto change = [&](int64_t offset) {
    std::fstream(copy, std::ios::in | std::ios::out | std::ios::binary).seekp(offset).put('!');
  };
  std::string expected;
  SUBCASE("another size") {
    std::filesystem::resize_file(copy, bytes + 1);
    expected = refused + "it has 40001 bytes, not 40000";
  }
  SUBCASE("the first bytes of a range") {
    change(20'480);
    expected = refused + "their bytes from 20480 on differ";
  }
  SUBCASE("its last ones") {
    change(bytes - 1);
    expected = refused + "their bytes from 36864 on differ";
  }
  SUBCASE("a link") {
    std::filesystem::remove(copy);
    std::filesystem::create_symlink(file, copy);
    expected = refused + "they are the same file";
  }
  SUBCASE("a folder twice") {
    folder = own.path() + "/.";
    expected = "they are the same file";
  }
  SUBCASE("nothing") {
    std::filesystem::remove(copy);
    expected = "cannot open " + copy;
  }
  CHECK_MESSAGE(told(made).find(expected) != std::string::npos, told(made));
}

TEST_CASE("a drive that fails or changes ends the steps with its file's name") {
  const TinyFolder folders[2];
  Drives calls;
  for (const TinyFolder& folder : folders) write_file(folder.path(), 32 * kBytes);
  DiskRing ring(layout_in_whole(32, kBytes), 32 * kBytes, {folders[0].path(), folders[1].path()},
                calls);
  CHECK(step(ring) == 0);
  CHECK(told([&] { ring.check(); }) == "nothing");
  const std::string file = folders[1].path() + "/data";
  SUBCASE("reading fails") {
    calls.fail(folders[1].path());
    const auto steps = [&] {
      while (true) step(ring);
    };
    CHECK(told(steps).starts_with("[disk] reading " + file + " at offset "));
  }
  SUBCASE("it shrinks") {
    std::filesystem::resize_file(file, kBytes);
    CHECK(told([&] { ring.check(); }).starts_with("[disk] " + file + " has 65536 bytes"));
  }
}

TEST_CASE("an engine with copies on other drives has the logits of the run in memory") {
  helm::test::TinyShape shape;
  shape.layers = 4;
  const helm::test::TinyModel model = tiny_model(shape);
  const TinyFolder folder, copies[2];
  const helm::test::TinyModel there = folder.on_disk(model, 1 << 20);
  helm::EngineOptions options;
  options.directory = folder.path();
  for (const TinyFolder& copy : copies) {
    std::filesystem::copy(folder.path(), copy.path(),
                          std::filesystem::copy_options::recursive |
                              std::filesystem::copy_options::overwrite_existing);
    options.copies.push_back(copy.path());
  }
  const std::vector<int32_t> ids = helm::test::token_ids(40, 5);
  helm::Engine engine(helm::Plan::from_json(there.plan), options);
  CHECK(logits_of(engine, ids, 8) == logits_of(*helm::test::tiny_engine(model), ids, 8));
  const helm::EngineStats stats = engine.stats();
  CHECK(stats.disk_drive_bytes.size() == 3);
  CHECK(sum(stats.disk_drive_bytes) == stats.disk_read_bytes);
  CHECK(stats.disk_used_bytes == 5 * stats.disk_step_bytes);
  std::filesystem::remove(copies[1].path() + "/weights");
  CHECK(told([&] { logits_of(engine, ids); }).find(copies[1].path() + "/weights is gone") !=
        std::string::npos);
  options.copies.front() = folder.path();
  CHECK(told([&] {
          helm::Engine(helm::Plan::from_json(there.plan), options);
        }).find("they are the same file") != std::string::npos);
}
