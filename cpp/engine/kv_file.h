// A sequence's KV cache in a file, so that a prompt need not be computed again. Knows no engine.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
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

// Writes beside `path` and renames at the end: a file is whole or as it was. Throws Error{kIo}.
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
  void write(const void* data, size_t bytes);

  std::string path_, temporary_;
  KvSpec kv_;
  int64_t positions_left_;
  std::FILE* file_;
};

// Throws Error{kIo} for a file that cannot be read, Error{kInvalid} for one that is no KV file, is
// damaged or cut short, was saved from another model, dtype or page geometry than the plan's or
// from other weights, or holds more positions than the plan's context.
class KvFileReader {
 public:
  KvFileReader(const std::string& path, const Plan& plan, const std::string& weights_digest);
  const KvFileHeader& header() const { return header_; }
  void read(std::vector<std::byte>& block);

 private:
  void take_header(const std::string& text, const Plan& plan, const std::string& weights_digest);
  void read(void* data, size_t bytes);

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  KvFileHeader header_;
};

}  // namespace helm
