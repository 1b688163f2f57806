// The scheduler of a block's threads: warp by warp, each until all its lanes wait or are done.
// Built without ThreadSanitizer, which then sees the order that barriers give and no other.
#include "block.h"

#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

extern "C" {
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

namespace cuda_emulation {
namespace {

constexpr int kWarp = 32;
constexpr unsigned char kPoison = 0xff;  // as floats, NaN
constexpr unsigned char kMargin = 0xa5;
constexpr size_t kMarginBytes = 64;

enum class State : uint8_t { kReady, kAtBarrier, kInExchange, kDone, kFaulted };

void order(void (*how)(void*), void* at) {
  if (how) how(at);
}

// One thread of the block.
struct Lane {
  Fiber fiber;
  uint3 index{};
  State state = State::kDone;
  WarpOp op{};
  unsigned mask = 0;
  uint64_t value = 0;
  int source = 0;
  uint32_t published[2][kMostWords] = {};  // in turn: others may still read the words before
  int turn = 0;
  std::vector<std::pair<int, AsyncCopy>> copies;  // with the group of each
  size_t handed_out = 0;
  int groups = 0;  // committed
  bool awaited = false;
};

class Block {
 public:
  void run(const Launch& launch);

  void barrier() {
    order(__tsan_release, &barrier_order_);
    wait(State::kAtBarrier);
    order(__tsan_acquire, &barrier_order_);
  }

  uint64_t exchange(WarpOp op, unsigned mask, uint64_t value, int source) {
    Lane& lane = *lanes_[current_];
    if (!(mask >> (current_ % kWarp) & 1))
      fail("a lane calls an exchange whose mask leaves it out");
    lane.op = op;
    lane.mask = mask;
    lane.value = value;
    lane.source = source;
    char* meeting = &warp_order_[current_ / kWarp];
    if (op == WarpOp::kSync) order(__tsan_release, meeting);
    wait(State::kInExchange);
    if (op == WarpOp::kSync) order(__tsan_acquire, meeting);
    return lane.value;
  }

  void publish(const uint32_t* words, int count) {
    Lane& lane = *lanes_[current_];
    lane.turn ^= 1;
    for (int i = 0; i < count; ++i) lane.published[lane.turn][i] = words[i];
    exchange(WarpOp::kPublish, 0xffffffffu, 0, 0);
  }
  uint32_t word(int lane, int word) const {
    const Lane& shown = *lanes_[current_ / kWarp * kWarp + static_cast<size_t>(lane)];
    return shown.published[lanes_[current_]->turn][word];
  }

  Lane& current() { return *lanes_[current_]; }

  [[noreturn]] void fail(const char* message) {
    message_ = message;
    order(__tsan_release, &fault_order_);
    lanes_[current_]->fiber.suspend((lanes_[current_]->state = State::kFaulted, true));
    __builtin_trap();
  }

  void await_previous() { lanes_[current_]->awaited = true; }
  int lane() const { return static_cast<int>(current_ % kWarp); }
  void* shared() const { return shared_.get(); }

 private:
  void wait(State state) {
    order(__tsan_release, &fault_order_);
    lanes_[current_]->state = state;
    lanes_[current_]->fiber.suspend(false);
  }
  static void enter(void* block);
  void start_threads();
  bool run_warp(size_t first, size_t end);
  bool finish_exchanges(size_t first, size_t end);
  void deliver(size_t first, size_t leader);
  bool open_barrier();
  void check_margin();
  [[noreturn]] void fault(const std::string& what);
  std::string describe(size_t i) const;

  const Launch* launch_ = nullptr;
  size_t threads_ = 0;
  std::vector<std::unique_ptr<Lane>> lanes_;
  size_t current_ = 0;
  const char* message_ = nullptr;
  char warp_order_[kWarp] = {};
  char barrier_order_ = 0;
  char launch_order_ = 0;
  char fault_order_ = 0;  // from threads that a fault leaves where they are
  std::unique_ptr<unsigned char[]> shared_;
};

thread_local Block* current_block = nullptr;

void Block::enter(void* block) {
  Block& self = *static_cast<Block*>(block);
  order(__tsan_acquire, &self.launch_order_);
  self.launch_->body(self.launch_->context);
  if (self.launch_->overlaps && !self.lanes_[self.current_]->awaited) {
    self.fail("a thread ends that has not waited for the kernel before");
  }
  order(__tsan_release, &self.launch_order_);
  self.lanes_[self.current_]->state = State::kDone;
  self.lanes_[self.current_]->fiber.suspend(true);
}

void Block::start_threads() {
  const dim3 b = launch_->block;
  while (lanes_.size() < threads_) lanes_.push_back(std::make_unique<Lane>());
  for (size_t i = 0; i < threads_; ++i) {
    Lane& lane = *lanes_[i];
    lane.index = {static_cast<unsigned>(i % b.x), static_cast<unsigned>(i / b.x % b.y),
                  static_cast<unsigned>(i / b.x / b.y)};
    lane.state = State::kReady;
    lane.turn = lane.groups = 0;
    lane.copies.clear();
    lane.handed_out = 0;
    lane.awaited = false;
    lane.fiber.prepare(&Block::enter, this);
  }
  std::memset(shared_.get(), kPoison, launch_->shared_bytes);
  std::memset(shared_.get() + launch_->shared_bytes, kMargin, kMarginBytes);
}

void Block::run(const Launch& launch) {
  launch_ = &launch;
  threads_ = size_t{launch.block.x} * launch.block.y * launch.block.z;
  shared_.reset(new unsigned char[launch.shared_bytes + kMarginBytes]);
  current_block = this;
  blockDim = launch.block;
  gridDim = launch.grid;
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; ++x) {
        blockIdx = {x, y, z};
        order(__tsan_acquire, &launch_order_);
        start_threads();
        order(__tsan_release, &launch_order_);
        do {
          for (size_t first = 0; first < threads_; first += kWarp) {
            const size_t end = first + kWarp < threads_ ? first + kWarp : threads_;
            while (run_warp(first, end)) {
            }
          }
        } while (open_barrier());
        check_margin();
      }
    }
  }
  order(__tsan_acquire, &launch_order_);
  current_block = nullptr;
}

// Runs every ready lane once. False when none was.
bool Block::run_warp(size_t first, size_t end) {
  bool ran = false;
  for (current_ = first; current_ < end; ++current_) {
    Lane& lane = *lanes_[current_];
    if (lane.state != State::kReady) continue;
    threadIdx = lane.index;
    lane.fiber.resume();
    ran = true;
    if (lane.state == State::kFaulted) fault(std::string(message_) + describe(current_));
  }
  return finish_exchanges(first, end) || ran;
}

// Completes each exchange for which all lanes of its mask have arrived.
bool Block::finish_exchanges(size_t first, size_t end) {
  bool any = false;
  for (size_t i = first; i < end; ++i) {
    const Lane& leader = *lanes_[i];
    if (leader.state != State::kInExchange) continue;
    bool complete = true;
    for (size_t j = 0; j < kWarp; ++j) {
      if (!(leader.mask >> j & 1)) continue;
      if (first + j >= end || lanes_[first + j]->state == State::kDone) {
        fault("an exchange names lane " + std::to_string(j) +
              ", which has ended or does not exist" + describe(i));
      }
      const Lane& other = *lanes_[first + j];
      complete = complete && other.state == State::kInExchange && other.mask == leader.mask &&
                 other.op == leader.op;
    }
    if (complete) deliver(first, i), any = true;
  }
  return any;
}

void Block::deliver(size_t first, size_t leader) {
  const unsigned mask = lanes_[leader]->mask;
  const WarpOp op = lanes_[leader]->op;
  uint64_t values[kWarp] = {}, ballot = 0;
  for (size_t j = 0; j < kWarp; ++j) {
    if (!(mask >> j & 1)) continue;
    values[j] = lanes_[first + j]->value;
    ballot |= uint64_t{values[j] != 0} << j;
  }
  for (size_t j = 0; j < kWarp; ++j) {
    if (!(mask >> j & 1)) continue;
    Lane& lane = *lanes_[first + j];
    if (op == WarpOp::kShuffle) {
      if (lane.source < 0 || lane.source >= kWarp || !(mask >> lane.source & 1)) {
        fault("a shuffle reads lane " + std::to_string(lane.source) + " outside its mask" +
              describe(first + j));
      }
      lane.value = values[lane.source];
    } else {
      lane.value = ballot;
    }
    lane.state = State::kReady;
  }
}

// True when threads may go on; false when all are done. No lane is ready.
bool Block::open_barrier() {
  size_t waiting = 0, exchanging = threads_;
  for (size_t i = 0; i < threads_; ++i) {
    if (lanes_[i]->state == State::kAtBarrier) ++waiting;
    if (lanes_[i]->state == State::kInExchange && exchanging == threads_) exchanging = i;
  }
  if (exchanging < threads_) {
    fault("deadlock: an exchange misses lanes of its mask" + describe(exchanging));
  }
  if (waiting == 0) return false;
  for (size_t i = 0; i < threads_; ++i) {
    if (lanes_[i]->state == State::kAtBarrier) lanes_[i]->state = State::kReady;
  }
  return true;
}

void Block::check_margin() {
  const unsigned char* margin = shared_.get() + launch_->shared_bytes;
  for (size_t i = 0; i < kMarginBytes; ++i) {
    if (margin[i] != kMargin) fault("a write past the end of dynamic shared memory");
  }
}

std::string Block::describe(size_t i) const {
  std::ostringstream s;
  const uint3 t = lanes_[i]->index;
  s << ", in thread (" << t.x << ", " << t.y << ", " << t.z << ")";
  return s.str();
}

void Block::fault(const std::string& what) {
  std::ostringstream s;
  s << what << " of block (" << blockIdx.x << ", " << blockIdx.y << ", " << blockIdx.z << ")";
  order(__tsan_acquire, &fault_order_);
  order(__tsan_acquire, &launch_order_);
  current_block = nullptr;
  throw std::runtime_error(s.str());
}

}  // namespace

void run_grid(const Launch& launch) {
  static thread_local Block block;
  block.run(launch);
}

void block_barrier() {
  current_block->barrier();
}

uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source_lane) {
  return current_block->exchange(op, mask, value, source_lane);
}

void warp_publish(const uint32_t* words, int count) {
  current_block->publish(words, count);
}

uint32_t warp_word(int lane, int word) {
  return current_block->word(lane, word);
}

void begin_copy(const AsyncCopy& copy) {
  Lane& lane = current_block->current();
  lane.copies.emplace_back(lane.groups, copy);
}

void commit_copies() {
  ++current_block->current().groups;
}

bool next_copy(int groups, AsyncCopy* copy) {
  Lane& lane = current_block->current();
  if (lane.handed_out == lane.copies.size()) return false;
  const auto& [group, next] = lane.copies[lane.handed_out];
  if (group >= lane.groups - groups) return false;
  *copy = next;
  ++lane.handed_out;
  return true;
}

int lane() {
  return current_block->lane();
}

void kernel_fault(const char* message) {
  current_block->fail(message);
}

void await_previous() {
  current_block->await_previous();
}

void* dynamic_shared_memory() {
  return current_block->shared();
}

}  // namespace cuda_emulation
