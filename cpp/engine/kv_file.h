// A sequence's KV cache in a file, so that a prompt need not be computed again. Knows no engine.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "helm/plan.h"

namespace helm {

// What a file says of itself: the model, the geometry of its pages, and the tokens it holds.
struct KvFileHeader {
  std::string fingerprint;     // of the plan's model
  std::string weights_digest;  // of what was loaded
  KvSpec kv;                   // without the number of pages
  std::vector<int32_t> tokens;
  std::string metadata;  // the caller's, UTF-8

  int64_t blocks() const {
    const auto positions = static_cast<int64_t>(tokens.size());
    return (positions + kv.page_tokens - 1) / kv.page_tokens;
  }
  int64_t block_bytes() const { return kv.layers * kv.page_bytes(); }
};

// Writes beside what `path` names, links followed, and renames at the end: a file is whole or as it
// was. A file that was there keeps owner and mode, a new one is its owner's alone. Throws
// Error{kIo}, and Error{kInvalid} for a path that names something else than a file.
class KvFileWriter {
 public:
  KvFileWriter(const std::string& path, const KvFileHeader& header);
  ~KvFileWriter();
  KvFileWriter(const KvFileWriter&) = delete;
  KvFileWriter& operator=(const KvFileWriter&) = delete;
  // The next block, [layers] pages; what it holds of positions past the tokens is cleared.
  void append(std::vector<std::byte>& block);
  void finish();

 private:
  void open();
  void write(const void* data, size_t bytes);
  void write_checked(std::span<const std::byte> data);
  [[noreturn]] void fail_to_write(int code) const;

  std::string path_;                // as given
  std::string target_;              // the file, links followed
  std::string temporary_;           // beside it
  std::optional<struct stat> old_;  // what is replaced
  KvSpec kv_;
  int64_t positions_left_;
  uint64_t checksum_ = 0;  // of what was written last
  std::FILE* file_ = nullptr;
};

// Throws Error{kIo} for a file that cannot be read, Error{kInvalid} for one that is no KV file, is
// damaged or cut short, was saved in another format, from another model, dtype or page geometry
// than the plan's or from other weights, or holds more positions than the plan's context.
class KvFileReader {
 public:
  KvFileReader(const std::string& path, const Plan& plan, const std::string& weights_digest);
  const KvFileHeader& header() const { return header_; }
  // The next block; throws if it is damaged.
  void read(std::vector<std::byte>& block);

 private:
  void check_kind();
  void take_header(const std::string& text, const Plan& plan, const std::string& weights_digest);
  void read(void* data, size_t bytes);
  uint64_t read_word();
  void read_checked(std::span<std::byte> data, const std::string& what);

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, &std::fclose};
  int64_t bytes_ = 0;
  int64_t next_block_ = 0;
  uint64_t checksum_ = 0;  // of what was read last
  KvFileHeader header_;
};

}  // namespace helm
