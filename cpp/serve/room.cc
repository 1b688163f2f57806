#include "serve/room.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"

namespace helm {

bool Room::prefix_is_coming(const Active& waiting, const RequestTable::List& running) const {
  const Request& request = waiting.request;
  if (prefixes_ == nullptr || !waiting.own_sequence()) return false;
  int64_t coming = 0;
  for (const Active* other : running) {
    if (other->id > waiting.id) break;
    if (other->state != Active::State::kRunning || !other->own_sequence()) continue;
    if (other->pending.empty() || other->decoding()) continue;  // its prompt is there
    const int64_t shared = common_prefix(other->request.prompt, request.prompt);
    if (shared > engine_.length(other->sequence)) coming = std::max(coming, shared);
  }
  coming = std::min(coming, std::ssize(request.prompt) - 1);
  return coming >= PrefixCache::kLeastShared &&
         coming - prefixes_->find(request.prompt) >= PrefixCache::kLeastShared;
}

// What has begun always ends: nothing begins that would not fit when it is alone.
void Room::check_fits(const Active& active) const {
  const Plan& plan = engine_.plan();
  const int64_t blocks = (active.most + page_tokens() - 1) / page_tokens();
  if (!active.own_sequence() || blocks <= plan.kv.blocks) return;
  fail(ErrorKind::kCapacity, "[generate] the request may come to ", active.most,
       " positions, which take ", blocks, " blocks of KV pages, there are ", plan.kv.blocks,
       "; lower max_tokens, shorten the prompt or give the KV cache more memory");
}

void Room::count(Active& active, int64_t capacity) {
  const int64_t blocks = (capacity + page_tokens() - 1) / page_tokens();
  active.capacity = capacity;
  blocks_ += blocks - std::exchange(active.blocks, blocks);
}

bool Room::open(Active& active, const RequestTable::List& running, bool alone) {
  const Request& request = active.request;
  int64_t cached = request.cached;
  check_fits(active);
  const int64_t wanted = promised(policy_, std::ssize(request.prompt), active.most, page_tokens());
  int64_t spare = 0;
  for (const Active* other : running) {
    if (other->own_sequence()) spare += next_blocks(other->capacity, other->most);
  }
  // When nothing is running that could make room, let open() say why it cannot.
  if (!active.own_sequence()) {
    active.sequence = request.sequence;
    active.most = engine_.capacity(request.sequence);
  } else if (prefixes_ == nullptr) {
    if (!alone && !engine_.can_open(wanted, spare)) return false;
    active.sequence = engine_.open(wanted);
    cached = 0;
  } else {
    const auto opened = alone ? std::optional(prefixes_->open(request.prompt, wanted))
                              : prefixes_->try_open(request.prompt, wanted, spare);
    if (!opened) return false;
    active.sequence = opened->sequence;
    cached = opened->cached;
  }
  active.pending.assign(request.prompt.begin() + cached, request.prompt.end());
  if (active.place.rank < 0) active.cached = cached;
  active.again = active.place.rank >= 0;
  count(active, engine_.capacity(active.sequence));
  return true;
}

bool Room::grow(Active& active, int64_t positions) {
  const int64_t needed = active.held() + positions;
  // One that has its sequence from others has all its room from them.
  if (needed <= active.capacity || !active.own_sequence()) return true;
  const int64_t wanted = whole_blocks(std::min(needed, active.most), active.most, page_tokens());
  while (!engine_.grow(active.sequence, wanted)) {
    if (prefixes_ == nullptr || !prefixes_->give_way()) return false;
  }
  count(active, wanted);
  return true;
}

void Room::release(Active& active) {
  blocks_ -= std::exchange(active.blocks, 0);
  if (const int64_t guesses = std::exchange(active.guesses, 0); guesses > 0) {
    engine_.truncate(active.sequence, engine_.length(active.sequence) - guesses);
  }
  if (!active.own_sequence()) return;
  const SequenceId sequence = std::exchange(active.sequence, -1);
  if (prefixes_ == nullptr) return engine_.close(sequence);
  prefixes_->keep(sequence, active.request.prompt);
}

}  // namespace helm
