// Walks the programs of a plan, for up to two steps at once: while one step waits for a device the
// CPU works on the next. Knows nothing of sequences.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "helm/engine.h"
#include "program/stages.h"

namespace helm {

class Executor {
 public:
  // accounts: by device, of those that the plan uses. Everything must outlive the executor.
  Executor(const Plan& plan, const Weights& weights, KvCache& kv, std::vector<Account*> accounts);
  ~Executor();

  // Whether a step may be split: two sub-batches take turns, so that the CPU attends for one while
  // the device computes the other.
  bool splits() const { return second_.program != nullptr; }
  // How many steps may be on their way at once.
  int64_t limit() const { return accounts_.size() > 1 ? std::ssize(flights_) : 1; }
  int64_t in_flight() const { return in_flight_; }
  int64_t evicted_blocks() const { return paging_ ? paging_->evicted_blocks() : 0; }
  int64_t near_room() const { return paging_ ? paging_->near_room() : 0; }
  int64_t near_most() const { return paging_ ? paging_->near_most() : 0; }
  int64_t leaving() const { return paging_ ? paging_->leaving() : 0; }
  FarUse far_use() const { return {evicted_blocks(), joint_steps_, split_steps_, far_rows_}; }

  // Before the next step's pages are looked up: brings those back to their device that it will
  // write to, and makes room there for `blocks` more; `far_blocks` in host memory stay free.
  void make_room(int64_t blocks, int64_t far_blocks = 0, std::span<const int32_t> recalled = {});
  // Blocks go to host memory, where there are slots for them, or come back. Before, slots that
  // others are leaving come free there. Both wait for all steps; after a failure no step can be
  // submitted any more.
  void free_near(int64_t slots);
  void move_blocks(std::span<const int32_t> blocks, bool far);
  // The first `positions` of a block of all heads, as files have it: what lies behind them may
  // change or not. All three wait for all steps.
  void read_block(const KvBlock& block, int64_t positions, std::byte* to);
  void write_block(const KvBlock& block, int64_t positions, const std::byte* from);
  // From one block to another that lies near. After a failure no step can be submitted any more.
  void copy_block(const KvBlock& from, const KvBlock& to, int64_t positions);
  // Rows to be filled for the next step, empty. Needs in_flight() < limit().
  StepRows& rows() { return flights_[next_].rows; }
  // Those of its second sub-batch, where it is to be split: the CPU attends for each. Waits for all
  // steps. Needs splits().
  StepRows& second_rows();
  // Sends them on their way: up to the first result that must be awaited, or to the end where what
  // is left on the devices in between is no other step's to overwrite. A split step comes to its
  // end but for the device's last work.
  void submit(bool split = false);
  // Finishes the oldest step. Its logits, [outputs, vocab_size], those of the second sub-batch
  // last, are valid until the next call of any member. Throws what a device failed with; then no
  // step can be submitted any more.
  std::span<const float> collect();
  // Runs every step to its end, so that pages may change hands; logits, or what a device failed
  // with, wait to be collected.
  void finish();

  // What is taken of a device's memory besides weights, by purpose; what steps have done.
  DeviceUse use_of(DeviceIndex device) const;
  void count(EngineStats& stats) const;

 private:
  struct Flight {
    StepRows rows;
    StepViews views;
    const BoundProgram* program = nullptr;
    size_t next = 0;                               // task
    bool awaited = false;                          // work of a device has not been waited for
    StagingMemory staging;                         // see BoundProgram
    std::byte* logits = nullptr;                   // where a device's come
    std::vector<float> kept;                       // the CPU's, which other steps would overwrite
    std::array<std::unique_ptr<Event>, 3> events;  // by queue
    Flight* second = nullptr;                      // the other sub-batch of a split step

    bool walked() const { return next == program->tasks.size(); }
    bool ended() const { return !awaited && walked(); }
    int64_t outputs() const { return std::ssize(rows.output_rows); }
  };
  // Where a walk ends: at what must be awaited, at the end, or where a turn does: at attention on
  // the device, or at what must be awaited, if that is not where the turn began.
  enum class Until : uint8_t { kAwaited, kTurn, kEnd };

  // Where a page lies: the CPU reaches it, or else the device.
  struct PagePlace {
    std::byte* host = nullptr;
    DeviceAddress device = DeviceAddress::kNull;

    bool exists() const { return host != nullptr || device != DeviceAddress::kNull; }
    PagePlace at(int64_t offset) const {
      return host != nullptr ? PagePlace{host + offset, DeviceAddress::kNull}
                             : PagePlace{nullptr, device + offset};
    }
  };

  void create_buffers();
  void create_flights();
  void settle();
  template <typename Work>
  void guarded(const Work& work);
  std::vector<PagePlace> places_of(const KvBlock& block) const;
  void check_devices() const;  // throws if one has failed
  const BoundProgram& program_for(const StepRows& rows, bool split) const;
  void begin(Flight& flight, const BoundProgram& program);
  void walk(Flight& flight, Until until);
  void walk_in_turns(Flight& first);
  void run_to_end(Flight& flight);
  std::span<const float> logits(const Flight& flight) const;
  void keep(Flight& flight, int64_t outputs) const;
  void await(Flight& flight) const;
  static bool attends_for_none(const Bound& bound, const Flight& flight);
  void enqueue(const Bound& bound, const Flight& flight);
  void run(const Bound& bound, const Flight& flight);
  void copy(const Bound& bound, const Flight& flight);
  int64_t bytes_of(const Bound& copy, const Flight& flight) const;
  int64_t first_far_row(const Flight& flight) const {
    return flight.views.on_cpu.tokens() - flight.views.far_on_cpu.tokens();
  }
  void visit_far_pages(const Bound& run, const Flight& flight);
  template <typename Move>
  void each_half(const KvBlock& block, const Move& move);
  Stream& queue(const Task& task);
  const DeviceBuffers& buffers(DeviceIndex device) const {
    return buffers_[static_cast<size_t>(device)];
  }
  Stream& main() { return *streams_.back(); }
  bool logits_cross() const { return plan_.units.back().device != kCpu; }
  Flight& oldest() {
    return flights_[(next_ + flights_.size() - static_cast<size_t>(in_flight_)) % flights_.size()];
  }

  const Plan plan_;  // with values for partial results of attention
  DiskRing* disk_;   // null where no weights lie on disk
  KvCache& kv_;
  std::vector<Account*> accounts_;
  std::vector<DeviceBuffers> buffers_;
  std::unique_ptr<Visits> visits_;
  std::unique_ptr<Paging> paging_;
  std::unique_ptr<Stages> stages_;
  std::vector<BoundProgram> programs_;  // of each kind of step
  BoundProgram second_program_;         // of second sub-batches
  std::array<Flight, 2> flights_;
  Flight second_;    // of the split step that is on its way
  size_t next_ = 0;  // flight of the next step
  int64_t in_flight_ = 0;
  int64_t visiting_steps_ = 0, cpu_attentions_ = 0, page_visits_ = 0;
  int64_t joint_steps_ = 0, split_steps_ = 0, far_rows_ = 0;
  std::string failure_;
  // Destroyed first, they wait for their work: by device, then for weights and for pages aside.
  std::vector<std::unique_ptr<Stream>> streams_;
  std::unique_ptr<Stream> weights_aside_, pages_aside_;
};

}  // namespace helm
