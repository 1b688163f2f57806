#include "base/mapped_file.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/check.h"

namespace helm {

// Mapped addresses. Never freed, as the handler may look at it at any time, but used again.
struct MappedFile::Region {
  std::atomic<uintptr_t> begin{0};  // 0: not in use
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> lost{false};  // something of it may have been read that it did not hold
  Region* next = nullptr;
};

namespace {

using Region = MappedFile::Region;

std::atomic<Region*> regions{nullptr};
std::mutex regions_mutex;  // of what follows; the handler takes none
int regions_in_use = 0;
bool chained = false;       // the handler is installed, perhaps below another's
struct sigaction previous;  // never written while it is

// Puts zeros in place of the region that holds the address; false where none does.
bool give_zeros(uintptr_t address) {
  for (Region* region = regions.load(); region != nullptr; region = region->next) {
    const uintptr_t begin = region->begin.load();
    const uintptr_t end = region->end.load();
    if (begin == 0 || address < begin || address >= end) continue;
    region->lost.store(true);
    // The system call itself: within a signal handler, and other threads may be reading there.
    return syscall(SYS_mmap, begin, end - begin, long{PROT_READ},
                   long{MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED}, -1L, 0L) != -1;
  }
  return false;
}

// As if ours did not exist.
void hand_on(int signal, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by a process, not by an access
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || (previous.sa_handler == SIG_IGN && !sent)) {
    struct sigaction fatal{};
    fatal.sa_handler = SIG_DFL;
    sigaction(signal, &fatal, nullptr);
    if (sent) raise(signal);  // an access is repeated
  } else if (previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  }
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int code = errno;
  const bool ours = info->si_code > 0 && give_zeros(reinterpret_cast<uintptr_t>(info->si_addr));
  if (!ours) hand_on(signal, info, context);
  errno = code;
}

bool is_function(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_bus_error;
}

// Not again below one that was installed after it and hands on to it: they would call each other.
void install() {
  struct sigaction found{};
  sigaction(SIGBUS, nullptr, &found);
  if (chained && is_function(found)) return;
  previous = found;
  chained = true;
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

void uninstall() {
  struct sigaction found{};
  sigaction(SIGBUS, nullptr, &found);
  if (!is_ours(found)) return;
  sigaction(SIGBUS, &previous, nullptr);
  chained = false;
}

Region* add_region(const std::byte* data, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(regions_mutex);
  Region* region = regions.load();
  while (region != nullptr && region->begin.load() != 0) region = region->next;
  if (region == nullptr) {
    region = new Region;
    region->next = regions.load();
    regions.store(region);
  }
  if (regions_in_use++ == 0) install();
  const auto begin = reinterpret_cast<uintptr_t>(data);
  region->lost.store(false);
  region->end.store(begin + static_cast<uintptr_t>(bytes));
  region->begin.store(begin);
  return region;
}

void remove_region(Region& region) {
  const std::lock_guard<std::mutex> lock(regions_mutex);
  region.begin.store(0);
  if (--regions_in_use == 0) uninstall();
}

}  // namespace

MappedFile::MappedFile(std::string path, int descriptor, const FileIdentity& identity)
    : path_(std::move(path)), identity_(identity) {
  const auto size = static_cast<size_t>(identity_.bytes);
  // Shared where the file system can: the pages of a private mapping would be copied if they were
  // locked for a device.
  void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) base = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (base == MAP_FAILED) {
    fail(ErrorKind::kIo, "[load] cannot map ", path_, ": ", std::strerror(errno),
         "; load with copied weights instead");
  }
  madvise(base, size, MADV_WILLNEED);  // starts reading what is not cached; only a hint
  data_ = static_cast<std::byte*>(base);
  region_ = add_region(data_, identity_.bytes);
}

MappedFile::~MappedFile() {
  remove_region(*region_);
  munmap(data_, static_cast<size_t>(identity_.bytes));
}

void MappedFile::check(bool used) const {
  struct stat status{};
  const int code = stat(path_.c_str(), &status) == 0 ? 0 : errno;
  const FileIdentity now = code == 0 ? FileIdentity::of(status) : FileIdentity{};
  if (now == identity_ && !region_->lost.load()) return;
  // Another file in its place leaves what is mapped as it was.
  if (used && now.same_file(identity_)) region_->lost.store(true);
  std::string how = identity_.change(code, now);
  if (how.empty()) how = "could not be read, or was another for a while";
  fail(ErrorKind::kIo, "[weights] ", path_, " ", how, " since it was mapped; restore it and load ",
       "the model anew, or load with copied weights");
}

}  // namespace helm
