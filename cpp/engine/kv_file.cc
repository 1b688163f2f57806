#include "engine/kv_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/json_reader.h"

namespace helm {
namespace {

// magic, bytes of the header as little-endian 64-bit, header in JSON, then blocks of pages
constexpr std::array<char, 8> kMagic = {'H', 'E', 'L', 'M', '-', 'K', 'V', '1'};
constexpr int64_t kMostHeader = int64_t{1} << 30;

}  // namespace

KvFileWriter::KvFileWriter(const std::string& path, const KvFileHeader& header)
    : path_(path),
      temporary_(path + ".part." + std::to_string(getpid())),
      kv_(header.kv),
      positions_left_(std::ssize(header.tokens)),
      file_(std::fopen(temporary_.c_str(), "wb")) {
  if (file_ == nullptr) {
    fail(ErrorKind::kIo, "[kv] cannot write ", path_, ": ", std::strerror(errno));
  }
  const nlohmann::json json = {
      {"model", header.fingerprint},          {"weights", header.weights_digest},
      {"dtype", dtype_name(header.kv.dtype)}, {"page_tokens", header.kv.page_tokens},
      {"layers", header.kv.layers},           {"kv_heads", header.kv.kv_heads},
      {"head_dim", header.kv.head_dim},       {"tokens", header.tokens},
      {"metadata", header.metadata}};
  const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const auto size = static_cast<uint64_t>(text.size());
  std::array<unsigned char, 8> little{};
  for (size_t i = 0; i < little.size(); ++i)
    little[i] = static_cast<unsigned char>(size >> (8 * i));
  try {
    write(kMagic.data(), kMagic.size());
    write(little.data(), little.size());
    write(text.data(), text.size());
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

void KvFileWriter::write(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, file_) != bytes) {
    fail(ErrorKind::kIo, "[kv] cannot write ", path_, ": ", std::strerror(errno));
  }
}

void KvFileWriter::append(std::vector<std::byte>& block) {
  const int64_t held = std::min(kv_.page_tokens, positions_left_);
  const int64_t position_bytes = kv_.head_dim * dtype_bytes(kv_.dtype);
  const int64_t head_bytes = kv_.page_tokens * position_bytes;
  const auto blank = static_cast<size_t>((kv_.page_tokens - held) * position_bytes);
  for (int64_t head = 0; head < std::ssize(block); head += head_bytes) {
    std::memset(block.data() + head + held * position_bytes, 0, blank);
  }
  positions_left_ -= held;
  write(block.data(), block.size());
}

void KvFileWriter::finish() {
  std::FILE* file = std::exchange(file_, nullptr);
  const bool flushed = std::fflush(file) == 0 && fsync(fileno(file)) == 0;
  if ((std::fclose(file) != 0) || !flushed || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int code = errno;
    std::remove(temporary_.c_str());
    fail(ErrorKind::kIo, "[kv] cannot write ", path_, ": ", std::strerror(code));
  }
}

KvFileReader::KvFileReader(const std::string& path, const Plan& plan,
                           const std::string& weights_digest)
    : path_(path), file_(std::fopen(path.c_str(), "rb"), &std::fclose) {
  if (file_ == nullptr) {
    fail(ErrorKind::kIo, "[kv] cannot read ", path, ": ", std::strerror(errno));
  }
  std::array<char, 8> magic{};
  std::array<unsigned char, 8> little{};
  struct stat status{};
  if (fstat(fileno(file_.get()), &status) != 0 ||
      status.st_size < static_cast<int64_t>(magic.size() + little.size())) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is no saved KV cache: it is too short");
  }
  read(magic.data(), magic.size());
  if (magic != kMagic) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is no KV cache saved by this version of HELM");
  }
  read(little.data(), little.size());
  uint64_t size = 0;
  for (size_t i = 0; i < little.size(); ++i) size |= static_cast<uint64_t>(little[i]) << (8 * i);
  if (size > static_cast<uint64_t>(std::min<int64_t>(status.st_size, kMostHeader))) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is damaged: its header ends beyond the file");
  }
  std::string text(size, '\0');
  read(text.data(), text.size());
  take_header(text, plan, weights_digest);
  const int64_t expected = static_cast<int64_t>(magic.size() + little.size() + size) +
                           header_.blocks() * header_.block_bytes();
  if (status.st_size != expected) {
    fail(ErrorKind::kInvalid, "[kv] ", path, " is damaged: it has ", status.st_size,
         " bytes, its header says ", expected);
  }
}

void KvFileReader::take_header(const std::string& text, const Plan& plan,
                               const std::string& weights_digest) {
  nlohmann::json document;
  try {
    document = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kInvalid, "[kv] ", path_, " is damaged: ", error.what());
  }
  const JsonReader root(document, "kv");
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
    fail(ErrorKind::kIo, "[kv] reading ", path_, " failed: unexpected end of file");
  }
}

void KvFileReader::read(std::vector<std::byte>& block) {
  block.resize(static_cast<size_t>(header_.block_bytes()));
  read(block.data(), block.size());
}

}  // namespace helm
