#include "engine/kv_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/xxh64.h"

namespace helm {
namespace {

// A file is the magic with the format's number, the header's bytes and checksum, the header in
// JSON, then each block of pages behind its checksum. Numbers are little-endian 64-bit words;
// checksums are XXH64, each with the one before as its seed, so that no block stands for another.
constexpr std::array<char, 7> kMagic = {'H', 'E', 'L', 'M', '-', 'K', 'V'};
constexpr char kFormat = '2';
constexpr int64_t kWord = sizeof(uint64_t);
constexpr int64_t kPrefix = 3 * kWord;  // before the header
constexpr int64_t kMostHeader = int64_t{1} << 30;

std::array<unsigned char, kWord> little_endian(uint64_t word) {
  std::array<unsigned char, kWord> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(word >> (8 * i));
  return bytes;
}

// Paths end at a NUL for the system, which would read or write another file.
void check_path(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    fail(ErrorKind::kInvalid, "[kv] the path of the file ",
         path.empty() ? "is empty" : "has a NUL character", "; name a file");
  }
}

// Where a chain of links ends, whether or not something is there.
std::filesystem::path followed(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // as the kernel follows
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(path); ++i) {
    path = path.parent_path() / std::filesystem::read_symlink(path);  // an absolute one stays alone
  }
  return path;
}

}  // namespace

KvFileWriter::KvFileWriter(const std::string& path, const KvFileHeader& header)
    : path_(path), kv_(header.kv), positions_left_(std::ssize(header.tokens)) {
  const nlohmann::json json = {
      {"model", header.fingerprint},          {"weights", header.weights_digest},
      {"dtype", dtype_name(header.kv.dtype)}, {"page_tokens", header.kv.page_tokens},
      {"layers", header.kv.layers},           {"kv_heads", header.kv.kv_heads},
      {"head_dim", header.kv.head_dim},       {"tokens", header.tokens},
      {"metadata", header.metadata}};
  const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  open();
  try {
    write(kMagic.data(), kMagic.size());
    write(&kFormat, 1);
    write(little_endian(text.size()).data(), kWord);
    write_checked(std::as_bytes(std::span(text)));
  } catch (...) {
    std::fclose(file_);
    std::remove(temporary_.c_str());
    throw;
  }
}

KvFileWriter::~KvFileWriter() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::remove(temporary_.c_str());
}

void KvFileWriter::fail_to_write(int code) const {
  fail(ErrorKind::kIo, "[kv] cannot write ", path_, ": ", std::strerror(code));
}

void KvFileWriter::open() {
  check_path(path_);
  struct stat found{};
  if (stat(path_.c_str(), &found) == 0) {
    if (!S_ISREG(found.st_mode)) {
      fail(ErrorKind::kInvalid, "[kv] cannot write ", path_,
           ": it is no file, and would be replaced by one; name a file");
    }
    old_ = found;
  } else if (errno != ENOENT) {
    fail_to_write(errno);
  }
  try {
    target_ = followed(path_).string();
  } catch (const std::filesystem::filesystem_error& error) {
    fail_to_write(error.code().value());
  }
  temporary_ = target_ + ".part.XXXXXX";
  const int descriptor = mkostemp(temporary_.data(), O_CLOEXEC);  // for its owner alone
  if (descriptor < 0) fail_to_write(errno);
  file_ = fdopen(descriptor, "wb");
  if (file_ != nullptr) return;
  const int code = errno;
  close(descriptor);
  std::remove(temporary_.c_str());
  fail_to_write(code);
}

void KvFileWriter::write(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, file_) != bytes) fail_to_write(errno);
}

void KvFileWriter::write_checked(std::span<const std::byte> data) {
  checksum_ = xxh64(data, checksum_);
  write(little_endian(checksum_).data(), kWord);
  write(data.data(), data.size());
}

void KvFileWriter::append(std::vector<std::byte>& block) {
  const int64_t held = std::min(kv_.page_tokens, positions_left_);
  const auto clear = [](std::byte* begin, std::byte* end) { std::fill(begin, end, std::byte{0}); };
  for (int64_t at = 0; at < std::ssize(block); at += kv_.slab_bytes()) {
    std::byte* slab = block.data() + at;
    std::byte* scales = slab + kv_.rows_bytes();
    clear(slab + held * kv_.row_bytes(), scales);
    clear(scales + held * kv_scale_bytes(kv_.dtype), slab + kv_.slab_bytes());
  }
  positions_left_ -= held;
  write_checked(block);
}

void KvFileWriter::finish() {
  std::FILE* file = std::exchange(file_, nullptr);
  const int descriptor = fileno(file);
  bool written = std::fflush(file) == 0;
  // Others may read what they could read before; where the owner cannot be kept, nobody.
  if (old_ && fchown(descriptor, old_->st_uid, old_->st_gid) == 0) {
    written = fchmod(descriptor, old_->st_mode & 0777) == 0 && written;
  }
  written = written && fsync(descriptor) == 0;
  if (std::fclose(file) != 0 || !written || std::rename(temporary_.c_str(), target_.c_str()) != 0) {
    const int code = errno;
    std::remove(temporary_.c_str());
    fail_to_write(code);
  }
}

KvFileReader::KvFileReader(const std::string& path, const Plan& plan,
                           const std::string& weights_digest)
    : path_(path) {
  check_path(path);
  check_kind();
  const uint64_t size = read_word();
  if (size > static_cast<uint64_t>(std::min(bytes_ - kPrefix, kMostHeader))) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is damaged: its header ends beyond the file");
  }
  std::string text(size, '\0');
  read_checked(std::as_writable_bytes(std::span(text)), "its header");
  take_header(text, plan, weights_digest);
  const int64_t expected =
      kPrefix + static_cast<int64_t>(size) + header_.blocks() * (kWord + header_.block_bytes());
  if (bytes_ != expected) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is damaged: it has ", bytes_,
         " bytes, its header says ", expected);
  }
}

// Opens the file and reads as far as to know that it is one of ours.
void KvFileReader::check_kind() {
  // Without waiting for a writer, should it be a pipe.
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor >= 0) file_.reset(fdopen(descriptor, "rb"));
  struct stat status{};
  if (file_ == nullptr || fstat(descriptor, &status) != 0) {
    fail(ErrorKind::kIo, "[kv] cannot read ", path_, ": ", std::strerror(errno));
  }
  bytes_ = status.st_size;
  if (!S_ISREG(status.st_mode) || bytes_ < kPrefix) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " is no saved KV cache: it is ",
         S_ISREG(status.st_mode) ? "too short" : "no file");
  }
  std::array<char, kMagic.size()> magic{};
  char format = 0;
  read(magic.data(), magic.size());
  read(&format, 1);
  if (magic != kMagic || format < '1' || format > '9') {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " is no KV cache saved by HELM");
  }
  if (format != kFormat) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " was saved by another version of HELM, in format ",
         format, ", this one reads format ", kFormat, "; compute the prompt anew and save it");
  }
}

void KvFileReader::take_header(const std::string& text, const Plan& plan,
                               const std::string& weights_digest) {
  const JsonDocument document(text, "kv", path_ + " is damaged");
  const JsonReader root = document.root();
  root.only({"model", "weights", "dtype", "page_tokens", "layers", "kv_heads", "head_dim", "tokens",
             "metadata"});
  const auto same = [&](const char* what, const auto& found, const auto& here) {
    if (found != here) {
      fail(ErrorKind::kInvalid, "[kv] ", path_, " was saved with another ", what, ": ", found,
           " there, ", here, " here; load the model as it was then, or compute the prompt anew");
    }
  };
  header_.fingerprint = root["model"].string();
  header_.kv = plan.kv;
  constexpr int64_t kMost = int64_t{1} << 40;
  header_.weights_digest = root["weights"].string();
  header_.metadata = root["metadata"].string();
  same("model", header_.fingerprint, plan.fingerprint);
  same("set of weights, or in another dtype", header_.weights_digest, weights_digest);
  same("dtype", root["dtype"].string(), std::string(dtype_name(plan.kv.dtype)));
  same("page size", root["page_tokens"].integer(1, kMost), plan.kv.page_tokens);
  same("number of layers", root["layers"].integer(1, kMost), plan.kv.layers);
  same("number of KV heads", root["kv_heads"].integer(1, kMost), plan.kv.kv_heads);
  same("head size", root["head_dim"].integer(1, kMost), plan.kv.head_dim);
  const JsonReader tokens = root["tokens"];
  for (size_t i = 0; i < tokens.size(); ++i) {
    header_.tokens.push_back(static_cast<int32_t>(tokens[i].integer(0, plan.vocab_size - 1)));
  }
  if (static_cast<int64_t>(tokens.size()) > plan.limits.context) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " holds ", tokens.size(),
         " positions, the context has ", plan.limits.context, "; raise the context (--context)");
  }
}

void KvFileReader::read(void* data, size_t bytes) {
  if (std::fread(data, 1, bytes, file_.get()) != bytes) {
    fail(ErrorKind::kIo, "[kv] reading ", path_, " failed: ",
         std::ferror(file_.get()) != 0 ? std::strerror(errno) : "unexpected end of file");
  }
}

uint64_t KvFileReader::read_word() {
  std::array<unsigned char, kWord> bytes{};
  read(bytes.data(), bytes.size());
  uint64_t word = 0;
  for (size_t i = 0; i < bytes.size(); ++i) word |= uint64_t{bytes[i]} << (8 * i);
  return word;
}

void KvFileReader::read_checked(std::span<std::byte> data, const std::string& what) {
  const uint64_t expected = read_word();
  read(data.data(), data.size());
  checksum_ = xxh64(data, checksum_);
  if (checksum_ != expected) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " is damaged: ", what,
         " does not have the checksum that was saved with it; compute the prompt anew");
  }
}

void KvFileReader::read(std::vector<std::byte>& block) {
  block.resize(static_cast<size_t>(header_.block_bytes()));
  read_checked(block, "block " + std::to_string(next_block_++) + " of its pages");
}

}  // namespace helm
