#include "kv/file.h"

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
#include "cpu/key_bias.h"

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
constexpr int64_t kChunk = int64_t{1} << 20;  // checked at once

std::array<unsigned char, kWord> little_endian(uint64_t word) {
  std::array<unsigned char, kWord> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(word >> (8 * i));
  return bytes;
}

// What pages hold: a cache of keys with their biases is another one than of keys without.
std::string content_name(const KvSpec& kv, bool lacks_biases) {
  return std::string(dtype_name(kv.dtype)) + (lacks_biases ? " without key biases" : "");
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
  nlohmann::json json = {{"model", header.fingerprint},
                         {"weights", header.weights_digest},
                         {"dtype", content_name(header.kv, header.lacks_biases)},
                         {"page_tokens", header.kv.page_tokens},
                         {"layers", header.kv.model_layers()},
                         {"kv_heads", header.kv.kv_heads},
                         {"head_dim", header.kv.head_dim},
                         {"tokens", header.tokens},
                         {"metadata", header.metadata}};
  if (header.window_begin > 0) json["window_begin"] = header.window_begin;
  const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  open();
  file_->write(kMagic.data(), kMagic.size());
  file_->write(&kFormat, 1);
  file_->write(little_endian(text.size()).data(), kWord);
  write_checked(std::as_bytes(std::span(text)));
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
    file_.emplace(followed(path_).string(), "[kv] cannot write " + path_);
  } catch (const std::filesystem::filesystem_error& error) {
    fail_to_write(error.code().value());
  }
}

void KvFileWriter::write_checked(std::span<const std::byte> data) {
  checksum_ = xxh64(data, checksum_);
  file_->write(little_endian(checksum_).data(), kWord);
  file_->write(data.data(), data.size());
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
  // Others may read what they could read before; where the owner cannot be kept, nobody.
  if (old_ && fchown(file_->descriptor(), old_->st_uid, old_->st_gid) == 0 &&
      fchmod(file_->descriptor(), old_->st_mode & 0777) != 0) {
    fail_to_write(errno);
  }
  file_->finish();
}

KvFileReader::KvFileReader(const std::string& path, const Plan& plan,
                           const std::string& weights_digest)
    : path_(path), pages_(plan.kv) {
  check_path(path);
  check_kind();
  const uint64_t size = word_at(kWord);
  if (size > static_cast<uint64_t>(std::min(bytes_ - kPrefix, kMostHeader))) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is damaged: its header ends beyond the file");
  }
  blocks_at_ = kPrefix + static_cast<int64_t>(size);
  std::string text(size, '\0');
  read_at(kPrefix, text.data(), std::ssize(text));
  checksum_ = xxh64(std::as_bytes(std::span(text)), 0);
  check_sum(word_at(2 * kWord), "its header");
  take_header(text, plan, weights_digest);
  check_size();
}

// Opens the file and reads as far as to know that it is one of ours.
void KvFileReader::check_kind() {
  // Without waiting for a writer, should it be a pipe.
  file_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (file_.get() < 0 || fstat(file_.get(), &status) != 0) {
    fail(ErrorKind::kIo, "[kv] cannot read ", path_, ": ", std::strerror(errno));
  }
  bytes_ = status.st_size;
  if (!S_ISREG(status.st_mode) || bytes_ < kPrefix) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " is no saved KV cache: it is ",
         S_ISREG(status.st_mode) ? "too short" : "no file");
  }
  std::array<char, kMagic.size()> magic{};
  char format = 0;
  read_at(0, magic.data(), std::ssize(magic));
  read_at(std::ssize(magic), &format, 1);
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
             "metadata", "window_begin"});
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
  header_.lacks_biases = cpu::lacks_key_biases(plan);
  same("dtype", root["dtype"].string(), content_name(plan.kv, header_.lacks_biases));
  header_.kv.page_tokens = root["page_tokens"].integer(1, kMost);
  same("number of layers", root["layers"].integer(1, kMost), plan.kv.model_layers());
  same("number of KV heads", root["kv_heads"].integer(1, kMost), plan.kv.kv_heads);
  same("head size", root["head_dim"].integer(1, kMost), plan.kv.head_dim);
  const JsonReader tokens = root["tokens"];
  for (size_t i = 0; i < tokens.size(); ++i) {
    header_.tokens.push_back(static_cast<int32_t>(tokens[i].integer(0, plan.vocab_size - 1)));
  }
  if (root.has("window_begin")) {
    const int64_t window = plan.kv.window(), past = std::ssize(header_.tokens) - window + 1;
    const int64_t most = window > 0 ? std::max<int64_t>(0, past) : 0;
    header_.window_begin = root["window_begin"].integer(0, most);
  }
  if (static_cast<int64_t>(tokens.size()) > plan.limits.context) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " holds ", tokens.size(),
         " positions, the context has ", plan.limits.context, "; raise the context");
  }
}

void KvFileReader::check_size() const {
  const KvSpec& kv = header_.kv;
  const int64_t held = bytes_ - blocks_at_;
  const int64_t position =
      2 * kv.model_layers() * kv.kv_heads * (kv.row_bytes() + kv_scale_bytes(kv.dtype));
  // The bytes of a page of more positions than the file holds might be too many to count.
  const bool fits = header_.tokens.empty()
                        ? held == 0
                        : kv.page_tokens <= held / position && held % block_step() == 0 &&
                              held / block_step() == header_.blocks();
  if (fits) return;
  fail(ErrorKind::kInvalid, "[kv] ", path_, " is damaged: it has ", bytes_,
       " bytes, which is not what ", header_.tokens.size(), " positions take");
}

void KvFileReader::read(std::vector<std::byte>& block) {
  block.resize(static_cast<size_t>(pages_.block_bytes()));
  const int64_t begin = next_position_;
  next_position_ = std::min(begin + pages_.page_tokens, std::ssize(header_.tokens));
  const int64_t page_tokens = header_.kv.page_tokens;
  for (int64_t position = begin; position < next_position_;) {
    const int64_t index = position / page_tokens;
    const int64_t end = std::min(next_position_, (index + 1) * page_tokens);
    if (index == checked_blocks_) check_block();
    gather(position, end - position, block.data());
    position = end;
  }
}

// Each block lies behind its checksum.
int64_t KvFileReader::block_step() const {
  return kWord + header_.block_bytes();
}
int64_t KvFileReader::block_at(int64_t index) const {
  return blocks_at_ + index * block_step() + kWord;
}

// The next one.
void KvFileReader::check_block() {
  Xxh64 sum(checksum_);
  const int64_t begin = block_at(checked_blocks_);
  const int64_t end = begin + header_.block_bytes();
  chunk_.resize(static_cast<size_t>(std::min(kChunk, header_.block_bytes())));
  for (int64_t at = begin; at < end; at += kChunk) {
    const auto chunk = std::span(chunk_).first(static_cast<size_t>(std::min(kChunk, end - at)));
    read_at(at, chunk.data(), std::ssize(chunk));
    sum.add(chunk);
  }
  checksum_ = sum.value();
  check_sum(word_at(begin - kWord), "block " + std::to_string(checked_blocks_) + " of its pages");
  ++checked_blocks_;
}

// Positions of one block of the file to where a block of the plan has them.
void KvFileReader::gather(int64_t position, int64_t count, std::byte* block) const {
  const KvSpec& there = header_.kv;
  const int64_t from_slot = position % there.page_tokens, to_slot = position % pages_.page_tokens;
  const int64_t row = pages_.row_bytes(), scale = kv_scale_bytes(pages_.dtype);
  const int64_t slabs = pages_.model_layers() * 2 * pages_.kv_heads;
  int64_t from = block_at(position / there.page_tokens);
  for (int64_t slab = 0; slab < slabs; ++slab) {
    read_at(from + from_slot * row, block + to_slot * row, count * row);
    read_at(from + there.rows_bytes() + from_slot * scale,
            block + pages_.rows_bytes() + to_slot * scale, count * scale);
    from += there.slab_bytes();
    block += pages_.slab_bytes();
  }
}

void KvFileReader::read_at(int64_t offset, void* data, int64_t bytes) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = pread(file_.get(), to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      fail(ErrorKind::kIo, "[kv] reading ", path_,
           " failed: ", got < 0 ? std::strerror(errno) : "unexpected end of file");
    }
    to += got;
    offset += got;
    bytes -= got;
  }
}

uint64_t KvFileReader::word_at(int64_t offset) const {
  std::array<unsigned char, kWord> bytes{};
  read_at(offset, bytes.data(), kWord);
  uint64_t word = 0;
  for (size_t i = 0; i < bytes.size(); ++i) word |= uint64_t{bytes[i]} << (8 * i);
  return word;
}

void KvFileReader::check_sum(uint64_t expected, const std::string& what) const {
  if (checksum_ == expected) return;
  fail(ErrorKind::kInvalid, "[kv] ", path_, " is damaged: ", what,
       " does not have the checksum that was saved with it; compute the prompt anew");
}

}  // namespace helm
