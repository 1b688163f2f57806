// Mapped files that change: what is read of them, what is told, and who gets other faults.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mapped_file.h"
#include "support/this_build.h"
#include "tiny_model.h"

namespace {

using helm::FileIdentity;
using helm::MappedFile;

constexpr int64_t kBytes = 1 << 20;

// A file of so many bytes 7, removed with it.
class Scratch {
 public:
  explicit Scratch(const std::string& name) : path_(std::filesystem::temp_directory_path() / name) {
    fill();
  }
  ~Scratch() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }
  void fill() const {
    const std::vector<char> content(kBytes, 7);
    std::ofstream(path_, std::ios::binary).write(content.data(), kBytes);
  }
  void cut(int64_t bytes) const { std::filesystem::resize_file(path_, static_cast<size_t>(bytes)); }
  std::unique_ptr<MappedFile> map() const {
    const int descriptor = open(path_.c_str(), O_RDONLY);
    struct stat status{};
    REQUIRE(fstat(descriptor, &status) == 0);
    auto mapped = std::make_unique<MappedFile>(path(), descriptor, FileIdentity::of(status));
    close(descriptor);
    return mapped;
  }

 private:
  std::filesystem::path path_;
};

int64_t sum(const MappedFile& file) {
  int64_t total = 0;
  for (int64_t i = 0; i < kBytes; i += 512) total += static_cast<int64_t>(file.data()[i]);
  return total;
}

std::string told(const MappedFile& file, bool used) {
  try {
    file.check(used);
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kIo);
    return error.what();
  }
  return "";
}

bool says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

[[maybe_unused]] bool handler_is_default() {
  struct sigaction action{};
  sigaction(SIGBUS, nullptr, &action);
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

}  // namespace

TEST_CASE("a file that is cut under its readers reads as zeros and is lost for ever") {
  const Scratch scratch("helm_mapped_cut");
  const auto file = scratch.map(), other = Scratch("helm_mapped_other").map();
  const struct timespec times[2] = {{1, 0}, {1, 0}};
  const auto set_time = [&] { utimensat(AT_FDCWD, scratch.path().c_str(), times, 0); };
  CHECK(sum(*file) == 7 * kBytes / 512);
  CHECK(told(*file, true).empty());
  scratch.cut(0);
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) readers.emplace_back([&] { CHECK(sum(*file) == 0); });
  for (std::thread& reader : readers) reader.join();
  CHECK(says(told(*file, true), "helm_mapped_cut has 0 bytes, not 1048576 since it was mapped"));
  CHECK(sum(*other) == 7 * kBytes / 512);
  scratch.fill();
  set_time();
  CHECK(says(told(*file, false), "was written to"));
  CHECK(sum(*file) == 0);
}

TEST_CASE("what may have been read as something else is lost, what was not read is not") {
  for (const bool used : {false, true}) {
    CAPTURE(used);
    const Scratch scratch("helm_mapped_written");
    const auto file = scratch.map();
    struct stat status{};
    stat(scratch.path().c_str(), &status);
    std::filesystem::last_write_time(scratch.path(), std::filesystem::file_time_type::clock::now());
    CHECK(says(told(*file, used), "was written to"));
    const struct timespec times[2] = {status.st_atim, status.st_mtim};
    utimensat(AT_FDCWD, scratch.path().c_str(), times, 0);
    const std::string after = told(*file, false);
    CHECK(after.empty() != used);
    CHECK(says(after, "could not be read, or was another for a while") == used);
    CHECK(sum(*file) == 7 * kBytes / 512);
  }
  const Scratch scratch("helm_mapped_replaced");
  const auto file = scratch.map();
  const std::string aside = scratch.path() + ".aside";
  std::filesystem::rename(scratch.path(), aside);
  CHECK(says(told(*file, true), "is gone"));
  scratch.fill();
  CHECK(says(told(*file, true), "was replaced by another file"));
  std::filesystem::rename(aside, scratch.path());
  CHECK(told(*file, true).empty());
}

TEST_CASE("a step during which a mapped file changes brings no logits") {
  const Scratch scratch("helm_mapped_weights");
  helm::test::TinyModel model = helm::test::tiny_model();
  const std::vector<float> embed = *model.tensors.at("embed").data;
  std::ofstream(scratch.path(), std::ios::binary)
      .write(reinterpret_cast<const char*>(embed.data()),
             static_cast<std::streamsize>(embed.size() * sizeof(float)));
  const std::string name = std::filesystem::path(scratch.path()).filename().string();
  model = model.with("/tensors/0/source", R"({"stored": "f32", "extents": [{"file": ")" + name +
                                              R"(", "offset": 0, "rows": 61, "row_stride": 0}]})");
  model = model.with_slices("cpu", "access", "resident", "mapped");
  model.tensors.erase("embed");
  helm::EngineOptions options = model.options();
  options.directory = std::filesystem::path(scratch.path()).parent_path().string();
  helm::Engine engine(helm::Plan::from_json(model.plan), options);
  const auto sequence = engine.open(20);
  const std::vector<int32_t> ids = helm::test::token_ids(3, 1);
  const helm::StepInput input{sequence, ids};
  CHECK(engine.step({&input, 1}).size() == 61);
  engine.submit({&input, 1});
  std::filesystem::last_write_time(scratch.path(), std::filesystem::file_time_type::clock::now());
  CHECK_THROWS_AS(engine.collect(), helm::Error);
  CHECK_THROWS_AS(engine.step({&input, 1}), helm::Error);
  CHECK(engine.length(sequence) == 6);  // the refused step has changed nothing
}

namespace {

volatile sig_atomic_t handled = 0;
struct sigaction below;

void hands_on(int signal, siginfo_t* info, void* context) {
  handled = handled + 1;
  if (handled < 5) below.sa_sigaction(signal, info, context);
}

// Faults in a file that is mapped by itself; how the process ends.
int status_of_fault(void (*handler)(int)) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    if (handler != nullptr) signal(SIGBUS, handler);
    const auto ours = Scratch("helm_mapped_ours").map();
    const int descriptor = memfd_create("other", 0);
    void* foreign = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, descriptor, 0);
    const volatile char first = *static_cast<const volatile char*>(foreign);
    _exit(first);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace

// Sanitizers have a handler of their own.
TEST_CASE("other faults go to the handler from before, and it comes back when no file is mapped" *
          doctest::skip(helm::test::kSanitized)) {
  const int fatal = status_of_fault(nullptr);
  CHECK(WIFSIGNALED(fatal));
  CHECK(WTERMSIG(fatal) == SIGBUS);
  CHECK(WTERMSIG(status_of_fault(SIG_IGN)) == SIGBUS);
  CHECK(WEXITSTATUS(status_of_fault([](int) { _exit(9); })) == 9);

  REQUIRE(handler_is_default());
  signal(SIGBUS, SIG_IGN);
  {
    const Scratch scratch("helm_mapped_first");
    auto first = scratch.map(), second = scratch.map();
    first.reset();
    // One that comes later stays, and ours is not put above it again.
    struct sigaction later{};
    later.sa_sigaction = hands_on;
    later.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &later, &below);
    second.reset();
    second = scratch.map();
    raise(SIGBUS);
    CHECK(handled == 1);
    sigaction(SIGBUS, &below, nullptr);
  }
  struct sigaction after{};
  sigaction(SIGBUS, nullptr, &after);
  CHECK((after.sa_handler == SIG_IGN));
  signal(SIGBUS, SIG_DFL);
}
