// Room for requests: gives each its sequence, lets that grow block by block, takes it back. Which
// request begins or gives way others say.
#pragma once

#include <cstdint>

#include "helm/prefix_cache.h"
#include "serve/growth.h"
#include "serve/request_table.h"

namespace helm {

class Room {
 public:
  Room(Engine& engine, PrefixCache* prefixes, const RoomPolicy& policy)
      : engine_(engine), prefixes_(prefixes), policy_(policy) {}

  // Whether a prompt on its way will soon have more of this one than can be had now. Nobody waits
  // for one that came later, so every wait ends.
  bool prefix_is_coming(const Active& waiting, const RequestTable::List& running) const;
  // Gives the request a sequence with room for its prompt and the first tokens; false if it must
  // wait. alone: nothing runs that could make room. Throws kCapacity for one that would find no
  // room alone.
  bool open(Active& active, const RequestTable::List& running, bool alone);
  // Room for so many more positions, for which what is kept gives way; false if there is none.
  bool grow(Active& active, int64_t positions);
  // Has something leave the accelerator that is kept; false if nothing of it is there.
  bool leave_near() { return prefixes_ != nullptr && prefixes_->leave_near(); }
  // Has something of it leave host memory, likewise.
  bool leave_far() { return prefixes_ != nullptr && prefixes_->leave_far(); }
  // Takes the sequence back, of which prefixes are kept.
  void release(Active& active);

  int64_t blocks() const { return blocks_; }  // of KV, reserved by running requests
  const RoomPolicy& policy() const { return policy_; }

 private:
  int64_t page_tokens() const { return engine_.plan().kv.page_tokens; }
  void check_fits(const Active& active) const;
  void count(Active& active, int64_t capacity);

  Engine& engine_;
  PrefixCache* prefixes_;  // or null
  RoomPolicy policy_;
  int64_t blocks_ = 0;
};

}  // namespace helm
