// Sequences over the KV cache: opened, shared, cut back, kept in files.
#include <algorithm>

#include "base/check.h"
#include "engine/engine_impl.h"
#include "engine/kv_file.h"

namespace helm {

const KvSequence& Engine::Impl::sequence(SequenceId id) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) fail(ErrorKind::kInvalid, "[engine] sequence ", id, " is not open");
  return it->second;
}

bool Engine::Impl::can_open(int64_t capacity) const {
  return static_cast<int64_t>(sequences_.size()) < plan_.limits.sequences &&
         kv_.blocks_for(capacity) <= kv_.unreserved();
}

void Engine::Impl::check_open(int64_t capacity, int64_t blocks) const {
  if (capacity < 1 || capacity > plan_.limits.context) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity,
         " positions was asked for, the plan's context is ", plan_.limits.context,
         "; raise --context or shorten the prompt");
  }
  if (static_cast<int64_t>(sequences_.size()) >= plan_.limits.sequences) {
    fail(ErrorKind::kCapacity, "[engine] ", sequences_.size(),
         " sequences are open, the plan's limit; close one or raise max_sequences");
  }
  if (blocks > kv_.unreserved()) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity, " positions needs ", blocks,
         " blocks of KV pages, ", kv_.unreserved(), " of ", kv_.blocks(),
         " are free; close a sequence, lower --context or give the KV cache more memory");
  }
}

SequenceId Engine::Impl::open(int64_t capacity) {
  check_open(capacity, kv_.blocks_for(capacity));
  sequences_.emplace(next_id_, kv_.open(capacity));
  return next_id_++;
}

SequenceId Engine::Impl::fork(SequenceId source, int64_t length, int64_t capacity) {
  const KvSequence& from = sequence(source);
  if (length < 0 || length > from.length || length > capacity) {
    fail(ErrorKind::kInvalid, "[engine] cannot begin a sequence of ", capacity,
         " positions with the first ", length, " of the ", from.length, " of sequence ", source);
  }
  check_open(capacity, kv_.blocks_to_fork(length, capacity));
  sequences_.emplace(next_id_, kv_.fork(from, length, capacity));
  return next_id_++;
}

void Engine::Impl::close(SequenceId id) {
  KvSequence& closed = sequence(id);
  pipeline_.finish();
  kv_.close(closed);
  sequences_.erase(id);
}

void Engine::Impl::save(SequenceId id, std::span<const int32_t> tokens, const std::string& path) {
  const KvSequence& saved = sequence(id);
  if (static_cast<int64_t>(tokens.size()) != saved.length) {
    fail(ErrorKind::kInvalid, "[kv] ", tokens.size(), " tokens were given for the ", saved.length,
         " positions of sequence ", id);
  }
  const KvFileHeader header{plan_.fingerprint, plan_.kv, {tokens.begin(), tokens.end()}};
  KvFileWriter writer(path, header);
  std::vector<std::byte> content(static_cast<size_t>(header.block_bytes()));
  for (const int32_t block : saved.blocks) {
    pipeline_.read_block(kv_.block(block), content.data());
    writer.append(content);
  }
  writer.finish();
}

std::pair<SequenceId, std::vector<int32_t>> Engine::Impl::load(const std::string& path,
                                                               int64_t capacity) {
  KvFileReader reader(path, plan_);
  const std::vector<int32_t>& tokens = reader.header().tokens;
  const auto length = static_cast<int64_t>(tokens.size());
  const SequenceId id = open(std::max(capacity, length));
  try {
    KvSequence& loaded = sequence(id);
    std::vector<std::byte> content;
    for (int64_t end = 0; end < length;) {
      end = std::min(length, end + plan_.kv.page_tokens);
      pipeline_.make_room(1);
      reader.read(content);
      kv_.extend(loaded, end);
      pipeline_.write_block(kv_.block(loaded.blocks.back()), content.data());
      kv_.grown(loaded, end);
    }
  } catch (...) {
    close(id);
    throw;
  }
  return {id, tokens};
}

void Engine::Impl::truncate(SequenceId id, int64_t length) {
  KvSequence& kept = sequence(id);
  if (length < 0 || length > kept.length) {
    fail(ErrorKind::kInvalid, "[engine] cannot truncate sequence ", id, " of ", kept.length,
         " positions to ", length);
  }
  if (const int64_t blocks = kv_.blocks_to_truncate(kept, length); blocks > kv_.unreserved()) {
    fail(ErrorKind::kCapacity, "[engine] cutting sequence ", id, " back to ", length,
         " positions needs ", blocks, " blocks of KV pages of its own, ", kv_.unreserved(), " of ",
         kv_.blocks(), " are free; close a sequence that shares its positions");
  }
  pipeline_.finish();
  kv_.truncate(kept, length);
}

}  // namespace helm
