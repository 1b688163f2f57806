// What the engine asks of a device: memory, in-order streams of copies and stages, events, and
// stages compiled once from a list of ops with bound buffers. Implemented by cpu, sim and cuda.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "helm/format.h"
#include "helm/machine.h"
#include "helm/plan.h"

namespace helm {

// An address in one device's memory, which only that device dereferences. On the CPU a pointer.
enum class DeviceAddress : uintptr_t { kNull = 0 };

constexpr DeviceAddress operator+(DeviceAddress address, int64_t bytes) {
  return static_cast<DeviceAddress>(static_cast<uintptr_t>(address) +
                                    static_cast<uintptr_t>(bytes));
}

inline constexpr int64_t kDeviceAlignment = 256;

// One sequence's rows in a step, and the pages of it that are to be attended to.
struct SequenceRun {
  int64_t first_row;       // of the step
  int64_t tokens;          // consecutive rows
  int64_t first_position;  // of the first row in its sequence
  const int32_t* pages;  // [blocks, KV entries] from first_block on: of each page its first unit in
                         // the memory that holds the entry, see KvSpec
  int64_t first_block = 0;
  int64_t end_block = std::numeric_limits<int64_t>::max();  // or where the positions end

  // One past the last block of which `pages` has entries.
  int64_t blocks_end(int64_t page_tokens) const {
    const int64_t positions = first_position + tokens;
    return std::min(end_block, (positions + page_tokens - 1) / page_tokens);
  }
};

// What one step works on. Rows of one sequence are consecutive.
struct StepView {
  std::span<const int32_t> token_ids;    // [tokens]
  std::span<const int32_t> positions;    // [tokens]
  std::span<const int32_t> output_rows;  // [outputs], rows whose logits are wanted
  std::span<const SequenceRun> runs;
  // Where a step runs in pieces, those of all pieces: the first ones, which share out its rows, are
  // the runs of one view of it, any one alone those of another. Views with the same number, not 0,
  // are equal but for `runs`: a device takes over the tables of a step once.
  std::span<const SequenceRun> all_runs = {};
  uint64_t number = 0;

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t outputs() const { return static_cast<int64_t>(output_rows.size()); }
  // The view of runs [first, first + count) of all.
  StepView piece(size_t first, size_t count) const {
    StepView view = *this;
    view.runs = all_runs.subspan(first, count);
    return view;
  }
};

// A number for a step that no other has.
inline uint64_t next_step_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// A point in a stream's work. Recording it again moves it.
class Event {
 public:
  virtual ~Event() = default;
  // Waits until the work before the last record() is done; at once if there was none. Throws the
  // Error with which that work failed.
  virtual void synchronize() = 0;
};

// Work that a device does in the order in which it was enqueued. Different streams overlap.
// Destroying a stream waits for its work.
class Stream {
 public:
  virtual ~Stream() = default;
  // Copies between host and device. Host memory from allocate_host() is copied at full speed and
  // while the host goes on; it must stay untouched until a later event of the stream has passed.
  virtual void upload(DeviceAddress to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, DeviceAddress from, int64_t bytes) = 0;
  virtual void record(Event& event) = 0;
  virtual void wait(Event& event) = 0;  // later work of this stream waits for the event
  virtual void synchronize() = 0;       // the host waits for all work; throws as Event does
};

// A run of ops compiled once. Nothing is allocated, looked up or decided per step beyond its shape.
class Stage {
 public:
  virtual ~Stage() = default;
  // Enqueues one step. What `step` refers to may change as soon as run() returns.
  virtual void run(Stream& stream, const StepView& step) = 0;
};

// A tensor in a device's memory.
struct Weight {
  DeviceAddress address = DeviceAddress::kNull;
  Format format;
};

// Ops and the buffers they are bound to. kNull where no op of the stage refers to a buffer.
// The plan and the units must outlive the stage.
struct StageSpec {
  const Plan* plan = nullptr;
  std::span<const UnitSpec> units;
  std::vector<Weight> weights;        // by TensorIndex
  std::vector<DeviceAddress> values;  // by ValueIndex, [limits.step_tokens or step_outputs, width]
  std::vector<DeviceAddress> kv;      // by KV entry: unit 0 of the memory with its pages
  DeviceAddress workspace = DeviceAddress::kNull;  // workspace_bytes(plan, units) bytes; stages
                                                   // that never run at the same time may share it
  // Of two sub-batches that take turns with stages that share the workspace: what the device keeps
  // of a step has a place apart there.
  bool second = false;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceInfo describe() const = 0;

  // Memory aligned to kDeviceAlignment, with undefined content. Throws Error{kMemory} that names
  // `purpose` when less than `bytes` is left, and changes nothing.
  virtual DeviceAddress allocate(int64_t bytes, const char* purpose) = 0;
  virtual void release(DeviceAddress address) = 0;

  // Page-locked host memory for copies; throws likewise.
  virtual std::byte* allocate_host(int64_t bytes, const char* purpose) = 0;
  virtual void release_host(std::byte* memory) = 0;
  // Of what was allocated, what the system takes from the host's memory as it is first written.
  virtual std::vector<std::span<const std::byte>> lazy_memory() const { return {}; }

  // Page-locks host memory that lies elsewhere, so that copies from it, and with `written` to it,
  // run at full speed; false, and slower copies, where that cannot be had.
  virtual bool pin(const void* memory, int64_t bytes, bool written) = 0;
  virtual void unpin(const void* memory) = 0;

  virtual std::unique_ptr<Stream> create_stream() = 0;
  virtual std::unique_ptr<Event> create_event() = 0;

  // Whether there are kernels for matrices in this format.
  virtual bool takes(const Format& format) const = 0;
  // Scratch that a stage of these units needs.
  virtual int64_t workspace_bytes(const Plan& plan, std::span<const UnitSpec> units) const = 0;
  // Throws Error{kInvalid} for a weight in a format that the device does not take.
  virtual std::unique_ptr<Stage> compile(const StageSpec& spec) = 0;
};

}  // namespace helm
