// Weights on disk: files that fail, change or refuse, the ring, and engines that read every step.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "disk_files.h"
#include "helm/program.h"
#include "plan/disk.h"
#include "tiny_model.h"
#include "weights/direct_file.h"
#include "weights/disk_ring.h"

namespace {

using helm::Arena;
using helm::DirectFile;
using helm::DiskLayout;
using helm::DiskRing;
using helm::Engine;
using helm::EngineOptions;
using helm::kDiskAlignment;
using helm::Plan;
using helm::test::content_at;
using helm::test::layout_of;
using helm::test::TinyFolder;
using helm::test::TinyModel;
using helm::test::TinyShape;
using helm::test::told;
using helm::test::write_file;

// Does what a test says, once or always, and else what the system does.
class Faults final : public helm::FileCalls {
 public:
  int open(const char* path, int flags) override {
    if (no_direct_open && (flags & O_DIRECT) != 0) {
      errno = EINVAL;
      return -1;
    }
    // Not every folder for temporary files takes O_DIRECT.
    const int descriptor = FileCalls::open(path, flags);
    return descriptor >= 0 ? descriptor : FileCalls::open(path, flags & ~O_DIRECT);
  }
  ssize_t read(int descriptor, void* to, size_t bytes, int64_t offset) override {
    ++reads;
    if (refused.exchange(0) > 0) {
      errno = EINVAL;
      return -1;
    }
    if (interrupted.exchange(0) > 0) {
      errno = EINTR;
      return -1;
    }
    if (error_from >= 0 && offset >= error_from) {
      errno = EIO;
      return -1;
    }
    return FileCalls::read(descriptor, to, most > 0 ? std::min(bytes, most) : bytes, offset);
  }

  bool no_direct_open = false;
  std::atomic<int> refused = 0, interrupted = 0, reads = 0;
  std::atomic<int64_t> error_from = -1;
  size_t most = 0;
};

void check_content(const DirectFile& file, int64_t bytes) {
  const int64_t size = helm::align_up(bytes, kDiskAlignment);
  const Arena memory(size, "a test");
  file.read(memory.data(), size, bytes, 0);
  int64_t wrong = 0;
  for (int64_t i = 0; i < bytes; ++i) wrong += memory.data()[i] != content_at(i);
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE(
    "a direct file is read whole: short reads, interruptions, and where O_DIRECT is refused") {
  const TinyFolder folder;
  const std::string path = write_file(folder.path(), 50'001);
  Faults calls;
  SUBCASE("as it is") {
    check_content(DirectFile(path, calls), 50'001);
  }
  SUBCASE("short and interrupted") {
    calls.most = 8192;
    calls.interrupted = 1;
    check_content(DirectFile(path, calls), 50'001);
    CHECK(calls.reads >= 7);
  }
  SUBCASE("opened without") {
    calls.no_direct_open = true;
    const DirectFile file(path, calls);
    CHECK(!file.direct());
    check_content(file, 50'001);
  }
  SUBCASE("read without") {
    calls.refused = 1;
    const DirectFile file(path, calls);
    check_content(file, 50'001);
    CHECK(!file.direct());
  }
}

TEST_CASE("what is wrong with a direct file is told") {
  const TinyFolder folder;
  const std::string path = write_file(folder.path(), 50'000);
  Faults calls;
  const auto file = std::make_unique<DirectFile>(path, calls);
  const Arena memory(1 << 20, "a test");
  const auto read = [&] { file->read(memory.data(), 53'248, 50'000, 0); };
  const auto check = [&] { file->check(); };
  CHECK(told(read) == "nothing");
  CHECK(told(check) == "nothing");
  SUBCASE("reading fails") {
    calls.error_from = 0;
    CHECK(told(read).find("Input/output error") != std::string::npos);
  }
  SUBCASE("it shrinks") {
    std::filesystem::resize_file(path, 20'000);
    CHECK(told(read).find("unexpected end of file") != std::string::npos);
    CHECK(told(check).find("has 20000 bytes, not 50000") != std::string::npos);
  }
  SUBCASE("it is written to") {
    std::filesystem::last_write_time(
        path, std::filesystem::last_write_time(path) + std::chrono::seconds(2));
    CHECK(told(check).find("was written to") != std::string::npos);
  }
  SUBCASE("it is replaced") {
    std::filesystem::rename(path, path + ".old");
    write_file(folder.path(), 50'000);
    CHECK(told(check).find("was replaced") != std::string::npos);
  }
  SUBCASE("it is gone") {
    std::filesystem::remove(path);
    CHECK(told(check).find("is gone") != std::string::npos);
  }
}

TEST_CASE("the ring has every unit of every step, and reads no more than it holds ahead") {
  const TinyFolder folder;
  const std::vector<int64_t> sizes = {3 << 20, 1 << 20, 4096, 2 << 20};
  write_file(folder.path(), 7 << 20);
  Faults calls;
  DiskRing ring(layout_of(sizes, 4 << 20), 4 << 20, {folder.path()}, calls);
  for (int step = 0; step < 3; ++step) {
    for (const helm::DiskUnit& unit : ring.layout().units) {
      ring.acquire(unit.unit);
      const std::byte* data = ring.data() + unit.place;
      int64_t wrong = 0;
      for (int64_t i = 0; i < unit.bytes; ++i)
        wrong += data[i] != content_at(unit.ranges[0].offset + i);
      CHECK(wrong == 0);
      ring.release(unit.unit);
    }
    CHECK(ring.used_bytes() == (step + 1) * ring.layout().step_bytes);
    CHECK(ring.read_bytes().front() <= ring.used_bytes() + ring.bytes());
  }
}

TEST_CASE("a read that fails ends the step, and every step behind it") {
  const TinyFolder folder;
  write_file(folder.path(), 2 << 20);
  Faults calls;
  calls.error_from = 1 << 20;
  DiskRing ring(layout_of({1 << 20, 1 << 20}, 1 << 20), 1 << 20, {folder.path()}, calls);
  ring.acquire(0);
  ring.release(0);
  for (int i = 0; i < 2; ++i) {
    CHECK(told([&] { ring.acquire(1); }).find("Input/output error") != std::string::npos);
  }
}

TEST_CASE("a file that is too short for its units is refused") {
  const TinyFolder folder;
  write_file(folder.path(), 10'000);
  Faults calls;
  const auto made = [&] { DiskRing(layout_of({8192, 4096}, 8192), 8192, {folder.path()}, calls); };
  CHECK(told(made).find("has 10000 bytes, expected 12288") != std::string::npos);
}

namespace {

TinyShape shape_of(int64_t layers, bool experts = false) {
  TinyShape shape;
  shape.layers = layers;
  if (experts) shape.experts = 4;
  shape.cpu_bytes = 64 << 20;
  return shape;
}

std::unique_ptr<Engine> engine_of(const TinyModel& model, const TinyFolder& folder) {
  EngineOptions options;
  options.directory = folder.path();
  return std::make_unique<Engine>(Plan::from_json(model.plan), options);
}

// Two sequences: a prompt in a step, then tokens of both.
std::vector<float> logits_of(Engine& engine, int64_t steps) {
  std::vector<float> all;
  const helm::SequenceId one = engine.open(100), other = engine.open(100);
  const auto step = [&](int64_t count, int32_t seed) {
    const std::vector<int32_t> first = helm::test::token_ids(count, seed),
                               second = helm::test::token_ids(1, seed + 1);
    const helm::StepInput inputs[] = {{one, first}, {other, second}};
    const auto logits = engine.step(inputs);
    all.insert(all.end(), logits.begin(), logits.end());
  };
  step(20, 3);
  for (int64_t i = 1; i < steps; ++i) step(1, static_cast<int32_t>(i));
  return all;
}

int64_t ring_of(const TinyModel& model, int64_t units) {
  const Plan plan = Plan::from_json(model.plan);
  int64_t largest = 0;
  for (const helm::DiskUnit& unit : disk_layout(plan).units) {
    largest = std::max(largest, unit.bytes);
  }
  return units * largest;
}

}  // namespace

TEST_CASE("logits are those of the run in memory, bit for bit, whatever the ring holds") {
  for (const bool experts : {false, true}) {
    const TinyModel model = tiny_model(shape_of(5, experts));
    const auto in_memory = helm::test::tiny_engine(model);
    const std::vector<float> expected = logits_of(*in_memory, 6);
    for (const int64_t every : {1, 2}) {
      for (const int64_t units : {1, 2, 40}) {
        CAPTURE(experts);
        CAPTURE(every);
        CAPTURE(units);
        const TinyFolder folder;
        const int64_t bytes = ring_of(folder.on_disk(model, 1 << 20, every), units);
        const auto engine = engine_of(folder.on_disk(model, bytes, every), folder);
        CHECK(logits_of(*engine, 6) == expected);
        const helm::EngineStats stats = engine->stats();
        const DiskLayout layout = disk_layout(engine->plan());
        CHECK(layout.units.size() == (every == 1 ? 10 : 6));
        CHECK(stats.disk_step_bytes == layout.step_bytes);
        CHECK(stats.disk_used_bytes == 6 * layout.step_bytes);
        CHECK(stats.disk_read_bytes <= stats.disk_used_bytes + bytes);
        CHECK(stats.devices[0].staging_bytes >= bytes);
        CHECK(stats.weights_bytes < in_memory->stats().weights_bytes);
      }
    }
  }
}

TEST_CASE("each unit on disk runs by itself, read into memory that an earlier one has left") {
  const TinyFolder folder;
  TinyModel model = folder.on_disk(tiny_model(shape_of(3)), 1 << 20, 2);
  CHECK(helm::programs(Plan::from_json(model.plan)) == std::vector<std::string>{R"(program rest
0 cpu run embedding
1 disk read layer.0.attention
2 cpu run layer.0.attention after 1
3 disk read layer.0.mlp
4 cpu run layer.0.mlp after 3
5 cpu run layer.1.attention..layer.1.mlp
6 disk read layer.2.attention
7 cpu run layer.2.attention after 6
8 disk read layer.2.mlp
9 cpu run layer.2.mlp after 8
10 cpu run head)"});
  model = folder.on_disk(tiny_model(shape_of(3)), ring_of(model, 1), 2);
  CHECK(helm::programs(Plan::from_json(model.plan)) == std::vector<std::string>{R"(program rest
0 cpu run embedding
1 disk read layer.0.attention
2 cpu run layer.0.attention after 1
3 disk read layer.0.mlp after 2
4 cpu run layer.0.mlp after 3
5 cpu run layer.1.attention..layer.1.mlp
6 disk read layer.2.attention after 4
7 cpu run layer.2.attention after 6
8 disk read layer.2.mlp after 7
9 cpu run layer.2.mlp after 8
10 cpu run head)"});
}

TEST_CASE("a file that changes while an engine runs ends its steps") {
  const TinyFolder folder;
  const TinyModel model = folder.on_disk(tiny_model(shape_of(4)), 1 << 20);
  const auto engine = engine_of(model, folder);
  logits_of(*engine, 2);
  const std::string path = folder.path() + "/weights";
  const auto time = std::filesystem::last_write_time(path);
  std::filesystem::last_write_time(path, time + std::chrono::seconds(3));
  CHECK(told([&] { logits_of(*engine, 1); }).find("was written to") != std::string::npos);
}

TEST_CASE("plans with weights on disk that cannot be read there are refused") {
  const TinyFolder folder;
  const TinyModel model = folder.on_disk(tiny_model(shape_of(2)), 1 << 20);
  const auto refused = [](const TinyModel& changed) {
    try {
      Plan::from_json(changed.plan);
    } catch (const helm::Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const auto says = [&](const TinyModel& changed, const char* text) {
    CAPTURE(text);
    CHECK_MESSAGE(refused(changed).find(text) != std::string::npos, refused(changed));
  };
  CHECK(refused(model) == "nothing");
  says(model.with("/schedule/disk_ring_bytes", "0"), "schedule.disk_ring_bytes: expected a multip");
  says(model.with("/schedule/disk_ring_bytes", "4097"), "expected a multiple of 4096");
  says(model.with("/schedule/disk_ring_bytes", "4096"), "schedule.disk_ring_bytes: holds 4096");
  says(model.with_slices("cpu", "access", "resident", "disk"), "only matrices are read from disk");
  says(model.with_slices("cpu", "access", "disk", "resident"),
       "expected 0, as no slice is on disk");
}
