// How many rows of prompts may join a step that decodes, so that tokens keep coming while a long
// prompt is computed. Judges by what steps took; knows no engine and no clock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace helm {

// What a step computes of prompts. pairs: of a row and a position that it attends to.
struct PromptWork {
  int64_t rows = 0;
  double pairs = 0;

  // A chunk of so many tokens behind `past` positions.
  void add(int64_t past, int64_t tokens) {
    const auto count = static_cast<double>(tokens);
    rows += tokens;
    pairs += count * (static_cast<double>(past) + count / 2);
  }
};

class Pacer {
 public:
  // most_rows: of prompts in a step. reads_more: steps with prompts may read weights that decoding
  // does without. Where they do not, what a step takes however few its rows are is no more than a
  // step without prompts takes, even where disturbed steps seem to say so.
  explicit Pacer(int64_t most_rows, bool reads_more = true)
      : most_rows_(most_rows), reads_more_(reads_more) {}

  // What a step that decodes may take; 0, as at first: kSlowdown times one in which all that run
  // decode, less where steps take unlike times, at least kLeastTarget_s. Of those that decode now
  // alone, it would leave prompts little while few do, and so few would come to.
  void aim(double target_s) { target_s_ = target_s; }
  // A step took so long.
  void note(int64_t decode_rows, const PromptWork& prompts, double seconds);
  // As many as fit the target behind `past` positions of a prompt, while so many requests run, for
  // tokens that have waited for so long. It gets half of the speed that it has alone there at
  // least: where a step reads more for prompts, many.
  int64_t rows(int64_t past, int64_t running, double waited_s = 0) const;
  // Whether the next step that decodes had better have no prompt, to tell what one without takes,
  // where the target depends on it: none was seen yet, or none for long while prompts kept coming.
  bool measures() const;

  // So that the slowest of a hundred tokens wait for kMostSlowdown times as long as the others at
  // most: they lie kTail mean deviations above the mean, some more than normal ones, as machines
  // are slow now and then.
  static constexpr double kSlowdown = 2.25, kMostSlowdown = 2.5, kTail = 3.5, kLeastTarget_s = 0.05;
  static constexpr int64_t kLeastRows = 4;
  static constexpr int64_t kFirstRows = 64;  // before a prompt was seen
  // Steps with prompts in a row, before one without: while others decode than in the last one
  // without, or the same.
  static constexpr int64_t kMostUnlike = 8, kMostAlike = 32;

 private:
  // A step takes cost_s_[0], and more for each row and each pair. The terms of a step, in that
  // order:
  using Terms = std::array<double, 3>;
  static Terms terms(const PromptWork& prompts) {
    return {1, static_cast<double>(prompts.rows), prompts.pairs};
  }
  double seconds(const Terms& terms) const;
  double full_s(int64_t running) const;  // of a step in which so many decode, without prompts
  double target_s(int64_t running) const;
  double least(int64_t past) const;  // rows with which a prompt has half of its speed
  void fit();

  // Sums over steps with prompts, older ones with less weight: of products of terms, and of terms
  // times seconds.
  std::array<Terms, 3> products_ = {};
  Terms seconds_ = {};
  Terms cost_s_ = {};
  double correction_ = 1;  // of what these say, by the last steps
  double deviation_ = 0;   // from what they say so, as a share: the mean of what it is
  int64_t without_ = 0;    // steps without prompts
  double decode_s_ = 0, mean_rows_ = 0;        // what they take and have, lately
  int64_t decode_rows_ = 0, latest_rows_ = 0;  // of the last one, of the last step
  int64_t since_ = 0;                          // steps with prompts since the last one
  int64_t most_rows_;
  bool reads_more_;
  double target_s_ = 0;
};

}  // namespace helm
