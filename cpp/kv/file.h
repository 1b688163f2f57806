// A sequence's KV cache in a file, so that a prompt need not be computed again. Knows no engine.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/part_file.h"
#include "helm/plan.h"

namespace helm {

// What a file says of itself: the model, the geometry of its pages, and the tokens it holds.
struct KvFileHeader {
  std::string fingerprint;     // of the plan's model
  std::string weights_digest;  // of what was loaded
  KvSpec kv;                   // as the file has them, without the number of pages
  std::vector<int32_t> tokens;
  std::string metadata;  // the caller's, UTF-8
  bool lacks_biases =
      false;                 // whether keys are held without the bias of the product that made them
  int64_t window_begin = 0;  // layers with a window lack what lies before

  int64_t blocks() const {
    const auto positions = static_cast<int64_t>(tokens.size());
    return (positions + kv.page_tokens - 1) / kv.page_tokens;
  }
  int64_t block_bytes() const { return kv.block_bytes(); }
};

// Writes to what `path` names, links followed: a file is whole or as it was. A file that was there
// keeps owner and mode, a new one is its owner's alone. Throws Error{kIo}, and Error{kInvalid} for
// a path that names something else than a file.
class KvFileWriter {
 public:
  KvFileWriter(const std::string& path, const KvFileHeader& header);
  // The next block, [layers, K and V, KV heads] slabs; what it holds of positions past the tokens
  // is cleared.
  void append(std::vector<std::byte>& block);
  void finish();

 private:
  void open();
  void write_checked(std::span<const std::byte> data);
  [[noreturn]] void fail_to_write(int code) const;

  std::string path_;                // as given
  std::optional<struct stat> old_;  // what is replaced
  KvSpec kv_;
  int64_t positions_left_;
  uint64_t checksum_ = 0;  // of what was written last
  std::optional<PartFile> file_;
};

// Reads into pages of the plan's size, whatever size the file's have. Throws Error{kIo} for a file
// that cannot be read, Error{kInvalid} for one that is no KV file, is damaged or cut short, was
// saved in another format, from another model or dtype than the plan's or from other weights, or
// holds more positions than the plan's context.
class KvFileReader {
 public:
  KvFileReader(const std::string& path, const Plan& plan, const std::string& weights_digest);
  const KvFileHeader& header() const { return header_; }
  // The next positions, as many as a page of the plan holds: such a block, whose rest
  // stays as it was. Throws if they are damaged. Takes a megabyte besides.
  void read(std::vector<std::byte>& block);

 private:
  void check_kind();
  void take_header(const std::string& text, const Plan& plan, const std::string& weights_digest);
  void check_size() const;
  void check_block();
  void check_sum(uint64_t expected, const std::string& what) const;
  void gather(int64_t position, int64_t count, std::byte* block) const;
  void read_at(int64_t offset, void* data, int64_t bytes) const;
  uint64_t word_at(int64_t offset) const;
  int64_t block_step() const;  // from one block to the next
  int64_t block_at(int64_t index) const;

  std::string path_;
  Descriptor file_;
  int64_t bytes_ = 0;
  int64_t blocks_at_ = 0;
  int64_t checked_blocks_ = 0;
  int64_t next_position_ = 0;
  uint64_t checksum_ = 0;  // of what was checked last
  std::vector<std::byte> chunk_;
  KvSpec pages_;  // the plan's
  KvFileHeader header_;
};

}  // namespace helm
