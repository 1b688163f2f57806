// What sequences held is kept after use, so that a prompt that begins like one of them need not be
// computed again. Knows tokens and pages, not text or sampling.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helm/engine.h"

namespace helm {

class PrefixTree;

// How many leading tokens are equal.
HELM_API int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b);

// Not reentrant, like its engine. While one is in use all sequences should be opened through it:
// only those it knows of are found, and only it can make room.
class HELM_API PrefixCache {
 public:
  // Fewer shared tokens are computed anew: a fork copies a page of each layer, and waiting for
  // another's prefix costs a step. A step of few rows takes the time of reading the weights, which
  // is the time of computing some 7 rows on a CPU and some 80 on a GPU.
  static constexpr int64_t kLeastShared = 16;

  struct Opened {
    SequenceId sequence = -1;
    int64_t cached = 0;  // leading prompt tokens that it holds
  };

  explicit PrefixCache(Engine& engine);  // which must outlive it
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  const Engine& engine() const { return engine_; }

  // Opens a sequence of up to `capacity` positions that holds what `prompt` shares with what is
  // kept or in use, all but the last token at most. What is kept gives way while there is no room,
  // block by block, the one used least recently first: open() throws kCapacity, try_open() returns
  // nothing, only when sequences in use are in the way; nothing is given up then.
  Opened open(std::span<const int32_t> prompt, int64_t capacity);
  // try_open() leaves `spare` blocks for others to grow.
  std::optional<Opened> try_open(std::span<const int32_t> prompt, int64_t capacity,
                                 int64_t spare = 0);
  // Whether `capacity` positions that share nothing would find room without what is kept, even if
  // those in use shared nothing either: then open() will not fail while no other is opened.
  bool fits(int64_t capacity) const;
  // How many tokens of the prompt open() would find.
  int64_t find(std::span<const int32_t> prompt) const;

  // Gives back what open() opened; throws kInvalid for what is not open. Kept are the positions
  // that stand for the first of `tokens`, and no pages beyond them. What is kept counts as blocks
  // alone, those that prefixes have in common once, and not among plan().limits.sequences.
  void keep(SequenceId sequence, std::span<const int32_t> tokens);
  void close(SequenceId sequence);
  // Gives up the block used least recently of what is kept; false if nothing is.
  bool give_way();
  // Moves what was used least recently, of what is kept on the accelerator, to host memory, or
  // gives it up where it cannot; false if nothing is there.
  bool leave_near();
  // Gives up the block used least recently, of prefixes that lie in host memory in part; false if
  // there are none.
  bool leave_far();
  // Gives up all that is kept.
  void clear();
  int64_t kept() const;  // prefixes, of which none begins with another

  // Engine::save() of what is kept that shares most with `tokens`; how many it holds of them.
  // Throws kInvalid where nothing does.
  int64_t save(std::span<const int32_t> tokens, const std::string& path,
               const std::string& metadata = "", const Progress& progress = {});
  // Engine::load(), and keeps what is loaded; its tokens and the metadata.
  std::pair<std::vector<int32_t>, std::string> load(const std::string& path,
                                                    const Progress& progress = {});

 private:
  struct HELM_LOCAL Match;

  HELM_LOCAL Match kept_match(std::span<const int32_t> tokens) const;
  HELM_LOCAL Match match(std::span<const int32_t> prompt) const;
  HELM_LOCAL bool make_room(Match& match, int64_t capacity, int64_t spare);
  HELM_LOCAL bool drop_oldest();

  Engine& engine_;
  std::unique_ptr<PrefixTree> kept_;
  std::map<SequenceId, std::vector<int32_t>> in_use_;  // prompts, which they may not hold yet
};

}  // namespace helm
