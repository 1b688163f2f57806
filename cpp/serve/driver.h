// Steps an engine for requests that come and go: admits, submits, collects, samples, settles. Which
// rows a step has the scheduler says. Runs in whatever thread calls, one at a time.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "helm/generation.h"
#include "serve/pacer.h"
#include "serve/ranking.h"
#include "serve/request_checks.h"
#include "serve/request_table.h"
#include "serve/room.h"
#include "serve/sample_rows.h"
#include "serve/scheduler.h"
#include "serve/speculator.h"
#include "serve/step_mode.h"

namespace helm {

class Driver {
  using Clock = std::chrono::steady_clock;
  static double seconds_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }
  static double seconds_of(Clock::time_point time) { return seconds_between({}, time); }

 public:
  // With `prefixes`, requests begin with what they share with a kept sequence or with one another.
  // Throws kInvalid for a speculation_obstacle().
  Driver(Engine& engine, PrefixCache* prefixes, Speculation speculation = {},
         const RoomPolicy& room = {});
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Requests that were checked; their ids grow.
  void add(std::unique_ptr<Active> request);
  // Ends a request at once, its tokens that were not taken are lost; no effect on one that has
  // ended. An own sequence is given back.
  void cancel(RequestId id);
  void cancel_all() noexcept;
  // Ends the requests that have not begun, each with this error.
  void refuse_waiting(const std::exception_ptr& why);
  bool ended() const { return table_.empty(); }
  // Runs a step or more, at least until one is collected; false if nothing can be done before a
  // sequence that others hold is given back. Throws what a step failed with; then again, until all
  // requests are cancelled: none can go on.
  bool step();
  // So many sequences more, or less, are held by others, who will give them back: a request waits
  // for their room.
  void held_by_others(int64_t change) { others_ += change; }
  // What a step that decodes may take beside prompts; 0: see Pacer.
  void pace(double step_target_s) { pacer_.aim(step_target_s); }
  // Awaits what is on its way; a failure is kept for the next step().
  void collect_steps() noexcept;

  bool has_tokens() const { return !tokens_.empty(); }
  std::vector<Token> take_tokens() { return std::exchange(tokens_, {}); }
  const RequestTable& table() const { return table_; }
  void forget(RequestId id) { table_.forget(id); }
  int64_t steps() const { return steps_; }  // collected
  const GuessCounts& guesses() const { return speculator_.counts(); }
  int64_t reserved_blocks() const { return room_.blocks(); }  // of KV, by running requests
  int64_t preemptions() const { return parked_; }             // requests that were parked
  int64_t waiting_parked() const;                             // of those, how many are
  int64_t moves_far() const { return moves_far_; }    // requests whose KV left the accelerator
  int64_t moves_near() const { return moves_near_; }  // and came back
  const ModeUses& mode_uses() const { return mode_uses_; }
  // What chooses the modes of steps, where the plan has tables of their seconds; else null.
  ModeChooser* modes() { return modes_ ? &*modes_ : nullptr; }

 private:
  // Whether nobody else has room that may come back.
  bool nobody_else() const { return table_.running().empty() && others_ == 0; }
  void admit();
  void refuse(Active& active, std::exception_ptr why);
  void park(Active& active);
  void make_way(Active& growing);
  bool choose();
  // driver_modes.cc
  bool is_far(const Active& active) const;
  void choose_mode();
  void note_mode(const ModeChoice& choice, double measured_s);
  void note_end(const Active& active);
  static void follow(double& mean, double value);
  bool may_begin(const Active& active);
  int64_t far_target(const Active& active, int64_t near);
  // driver_sides.cc
  int64_t far_blocks(const Active& active) const;
  void settle_sides();
  int64_t near_wanted() const;
  bool fits_near() const;
  bool make_near();
  bool move_someone();
  bool hold_prompts();
  bool park_someone();
  bool shares_near() const;
  Active* least_near(bool moves) const;
  bool fits_far() const;
  bool make_far();
  void move(Active& active, KvSide side);
  void release(Active& active);
  void look();
  bool is_read() const;
  int64_t prompt_rows(int64_t past, double waited_s = 0) const;
  double longest_wait_s() const;
  std::vector<Draft> guess();
  bool submit(bool alone);
  void collect() noexcept;
  void take(Active& active, SampledRows& rows);
  void finish_with_error(Active& active, std::exception_ptr failure);
  void settle();

  // Whose logits a step brings, those behind guesses too.
  struct Output {
    RequestId request;
    Draft draft;
  };
  // A submitted step; its outputs in order. alone: none other was to be on its way with it.
  struct Flight {
    std::vector<Output> outputs;
    int64_t decode_rows = 0, guesses = 0;
    PromptWork prompts;
    ModeChoice mode;
    bool alone = false;
    Clock::time_point begun, submitted;
  };

  Engine& engine_;
  Room room_;
  Ranking ranking_;
  RowSampler sampler_;
  const EngineStats stats_;
  Scheduler scheduler_;
  Pacer pacer_;
  Speculator speculator_;
  std::optional<ModeChooser> modes_;
  Clock::time_point collected_;  // the last step
  RequestTable table_;
  Snapshot snapshot_;  // of the running requests; what follows belongs to the step being planned
  Batch batch_;
  ModeChoice choice_;
  std::vector<StepInput> inputs_;
  std::deque<Flight> flights_;  // submitted steps, oldest first
  std::vector<Token> tokens_;   // drawn and not yet taken
  std::exception_ptr failure_;  // of a step: what it should have brought is lost
  int64_t steps_ = 0;
  int64_t parked_ = 0;
  int64_t moves_far_ = 0, moves_near_ = 0;
  int64_t others_ = 0;  // sequences that are held by others
  ModeUses mode_uses_;
  double usual_s_ = 0;  // between tokens of a near request, lately
  RequestShape shape_;  // of requests that ended, lately
  struct {
    int64_t near = -1, far = 0, until = 0;  // a step
  } target_;                                // of far requests
};

}  // namespace helm
