// Sequences kept after use, so that a prompt that begins like one of them need not be computed
// again. Knows tokens and pages, not text or sampling.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helm/engine.h"

namespace helm {

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

  explicit PrefixCache(Engine& engine) : engine_(engine) {}  // which must outlive it
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  const Engine& engine() const { return engine_; }

  // Opens a sequence of up to `capacity` positions that holds what `prompt` shares with one that is
  // kept or in use, all but the last token at most. Kept sequences give way while there is no room,
  // the one used least recently first: open() throws kCapacity, try_open() returns nothing, only
  // when those in use are in the way.
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
  // that stand for the first of `tokens`, and no pages beyond them.
  void keep(SequenceId sequence, std::span<const int32_t> tokens);
  void close(SequenceId sequence);
  // Gives up what was used least recently of what is kept; false if nothing is.
  bool give_way();
  // Moves what was used least recently, of what is kept on the accelerator, to host memory, or
  // gives it up where there is no room; false if nothing is there.
  bool leave_near();
  // Closes the kept sequences.
  void clear();
  int64_t kept() const;

  // Engine::save() of the kept sequence that shares most with `tokens`; how many it holds of them.
  // Throws kInvalid where none does.
  int64_t save(std::span<const int32_t> tokens, const std::string& path,
               const std::string& metadata = "", const Progress& progress = {});
  // Engine::load(), and keeps the sequence; its tokens and the metadata.
  std::pair<std::vector<int32_t>, std::string> load(const std::string& path,
                                                    const Progress& progress = {});

 private:
  struct Entry {
    std::vector<int32_t> tokens;  // of one in use: the prompt, which it may not hold yet
    bool in_use = true;
    int64_t used = 0;  // when, by the clock
  };
  struct Match {
    SequenceId sequence = -1;  // none
    int64_t shared = 0;
    bool whole = false;  // the sequence is kept and holds nothing else
  };

  HELM_LOCAL Match match(std::span<const int32_t> prompt) const;
  HELM_LOCAL std::optional<SequenceId> start(const Match& match, int64_t capacity, int64_t spare,
                                             bool cut);
  template <typename Fits>
  HELM_LOCAL SequenceId oldest(const Fits& fits) const;
  HELM_LOCAL bool drop_oldest(SequenceId except);

  Engine& engine_;
  std::map<SequenceId, Entry> entries_;
  int64_t clock_ = 0;
};

}  // namespace helm
