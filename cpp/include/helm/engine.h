// The native runtime: loads the weights of a plan and runs steps over batches of sequences.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helm/held_block.h"
#include "helm/plan.h"
#include "helm/types.h"

namespace helm {

using SequenceId = int32_t;

// Where a sequence's KV lies, as far as it is of an accelerator's layers: there, or in host memory,
// where the CPU attends to it.
enum class KvSide : uint8_t { kNear, kFar };

// What became of KV that the accelerator does not hold, since the start.
struct FarUse {
  int64_t evicted_blocks = 0;  // left it for host memory
  int64_t joint_steps = 0;     // in which the CPU attended for some rows of one batch
  int64_t split_steps = 0;     // and those of two sub-batches, which took turns
  int64_t rows = 0;            // for which it did, of all steps
};

// Called as bytes are read or written; may throw to cancel.
using Progress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

// A tensor that already lies in memory, row-major and contiguous. Used in place (no copy) on
// the CPU when its dtype is the format of the slice, so it must outlive the engine; `owner` is kept
// until then.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::shared_ptr<void> owner;
};

struct EngineOptions {
  std::string directory;  // where the sources of the plan's tensors lie
  // Folders with copies of those files, on other drives: what steps read from disk comes from all
  // of them at once. Not looked at for a plan that leaves nothing there.
  std::vector<std::string> copies;
  std::map<std::string, TensorView> tensors;  // tensors bound from memory, by name
  // Always so many. 0: as planned, fewer in decode while other programs make fewer faster.
  int threads = 0;
  // While at work, thread i stays on CPU cpus[i], as far as the system allows, and the weights that
  // it reads are placed on its memory node; the thread that calls the engine is number 0 and gets
  // its affinity back after each call. Empty: the system moves threads as it likes.
  std::vector<int> cpus;
  std::string device = "cuda";                  // the plan's accelerator; see helm/machine.h
  std::vector<std::string> cublas_directories;  // see helm/machine.h
  Progress progress;
  // For tests of schedules: a stage takes no less time than memory of this rate would, 0: as long
  // as it takes. docs/planning.md says what counts. sim:memory=RATE is the accelerator's.
  // node_bytes_per_s: of the CPU's weights on nodes that the plan names; 0: as the others.
  // disk_bytes_per_s: what all drives together give at most.
  struct Pace {
    double cpu_bytes_per_s = 0;
    double node_bytes_per_s = 0;
    double disk_bytes_per_s = 0;
  } pace;
  // For tests: places memory on a node of the machine in place of the system's call. Returns 0 or
  // an errno.
  std::function<int(void* memory, int64_t bytes, int node)> bind_memory;
};

// What an engine holds on one device.
struct DeviceUse {
  std::string device;  // its name in the plan
  std::string kind;    // "cpu", "sim" or "cuda"
  std::string name;
  int64_t weights_bytes = 0;
  int64_t kv_bytes = 0;
  int64_t activations_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t staging_bytes = 0;  // buffers of copies between devices, and of reads from disk
  int64_t peak_bytes = 0;     // of all that was allocated there at once
  int64_t budget_bytes = 0;   // the plan's limit, reserve included; 0: none
};

// How long ops of one kind took on the CPU.
struct OpTime {
  std::string op;  // "linear", "attention", "norm", ...
  int64_t runs = 0;
  double seconds = 0;  // up to the barrier after each
};

// Of the ops of experts that ran on the CPU.
struct ExpertsUse {
  int64_t runs = 0;
  int64_t rows = 0;      // tokens, of all runs
  int64_t distinct = 0;  // experts that some row of a run has, of all runs
  double expected = 0;   // how many these would be, each chosen as often as any other
};

struct EngineStats {
  int64_t weights_bytes = 0;       // placed weights, on all devices
  int64_t decode_bytes = 0;        // weight bytes that one decode step reads
  int64_t kv_bytes = 0;            // the KV pool, when every page has been touched
  int64_t kv_token_bytes = 0;      // K and V of one position over all layers
  int64_t activations_bytes = 0;   // value buffers
  int64_t workspace_bytes = 0;     // per-thread scratch and attention partials
  std::vector<DeviceUse> devices;  // the CPU, then the accelerator if the plan uses one
  int64_t streamed_steps = 0;      // in which weights visited the accelerator
  int64_t pageable_bytes = 0;      // weights and KV that visit it and could not be page-locked
  int64_t evicted_blocks = 0;      // KV blocks that left it for host memory
  int64_t cpu_attentions = 0;      // to such blocks, by the CPU; per layer and step
  int64_t joint_steps = 0;         // in which the CPU attended so, for some rows of one batch
  int64_t split_steps = 0;         // and those of two sub-batches, which took turns
  int64_t far_rows = 0;            // for which it did, of all steps
  int64_t page_visits = 0;         // of such blocks' pages to the accelerator
  int64_t disk_step_bytes = 0;     // of weights, those that each step reads from disk
  int64_t disk_read_bytes = 0;     // so far, with what was read ahead
  int64_t disk_used_bytes = 0;     // of those, what steps have used
  // Those read so far by drive: of the directory, then of each of the copies.
  std::vector<int64_t> disk_drive_bytes;
  bool disk_direct = true;      // no read went through the page cache
  int64_t crossings = 0;        // of activations between devices, per step
  std::vector<OpTime> cpu_ops;  // as counted since count_op_times(true)
  ExpertsUse experts;
  int threads = 0;
  int active_threads = 0;    // of them, those that decode
  std::vector<int> cpus;     // of the threads; empty: as the system likes
  std::string isa;           // of the CPU's kernels
  int64_t copied_bytes = 0;  // of the CPU's weights, those copied to arenas
  // Of the CPU's weights, those on each memory node that the plan names.
  std::map<int, int64_t> node_bytes;
  bool huge_pages = false;  // whether the system accepted the arenas' request for huge pages
  // How much of the arenas it put on them, when all was copied; nothing where it does not tell.
  std::optional<int64_t> huge_page_bytes;
  double load_s = 0;
};

// One sequence's share of a step.
struct StepInput {
  enum class Outputs : uint8_t { kNone, kLast, kAll };
  SequenceId sequence = 0;
  std::span<const int32_t> tokens;
  Outputs outputs = Outputs::kLast;
  int64_t last = 1;  // with kLast: of so many tokens at the end
};

// A sequence opened from a file, the tokens it stands for, and what was written with them.
struct LoadedSequence {
  SequenceId sequence = 0;
  std::vector<int32_t> tokens;
  std::string metadata;
};

// Not reentrant: calls on one engine must not overlap, nor come from a callback of one. The Python
// module keeps them apart. In a forked child, which lacks its threads, all that says more than
// plan() throws kInvalid, and the destructor leaves everything as it is.
class HELM_API Engine {
 public:
  // Loads the weights. Throws kInvalid for a plan or options that cannot be, kIo for files that
  // cannot be read, have changed or lack what the plan says, kMemory where a memory does not hold
  // the plan, kDevice and kAbsent for the accelerator, kCompression.
  Engine(Plan plan, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Plan& plan() const;
  bool forked() const;         // whether this is such a child
  void check_process() const;  // throws in one
  EngineStats stats() const;
  FarUse far_use() const;          // of stats(), for who asks at every step
  ExpertsUse experts_use() const;  // likewise
  // Memory of the host, besides weights, that the system provides as it is first written.
  std::vector<std::span<const std::byte>> lazy_memory() const;
  // Counts the time of ops from now on, from zero, or no longer; slows steps by some nanoseconds
  // per op.
  void count_op_times(bool on);

  // Opens a sequence that may grow to `capacity` positions; its pages are reserved now, so that no
  // later step runs out. grow() reserves more. It begins with the positions of `prefix`, see
  // detach(). Throws kCapacity when sequences or pages are exhausted, kInvalid for a prefix that is
  // not usable().
  SequenceId open(int64_t capacity, const HeldPrefix& prefix = {});
  // Whether open() would find room and leave `spare` blocks, if `without` were released.
  bool can_open(int64_t capacity, int64_t spare = 0, const HeldPrefix& prefix = {},
                std::span<const HeldBlock> without = {}) const;
  // Opens a sequence that begins with the first `length` positions of `source`, whose pages it
  // shares; what either appends later is its own. Throws likewise, and kInvalid for a length that
  // `source` does not have.
  SequenceId fork(SequenceId source, int64_t length, int64_t capacity);
  // The sequence's first positions in a file, with the tokens they stand for, one per position, and
  // any text of the caller's. A save that fails leaves the file as it was. Loading opens a sequence
  // of at least `capacity` positions. Throws kIo, and kInvalid for a file of another model, other
  // weights, another dtype or page geometry, or of more positions than the context has.
  void save(SequenceId sequence, std::span<const int32_t> tokens, const std::string& path,
            const std::string& metadata = "", const Progress& progress = {});
  LoadedSequence load(const std::string& path, int64_t capacity, const Progress& progress = {});
  void save(std::span<const HeldBlock> blocks, std::span<const int32_t> tokens,
            const std::string& path, const std::string& metadata = "",
            const Progress& progress = {});
  // The blocks of the sequence's first `length` positions. It has them as long as it does not
  // change: the caller holds none of them.
  std::vector<HeldBlock> blocks(SequenceId sequence, int64_t length) const;
  // Closes the sequence, and the caller holds those blocks from now on, until release(). They count
  // as memory, not as a sequence. Any number of sequences may begin with them.
  std::vector<HeldBlock> detach(SequenceId sequence, int64_t length);
  void release(std::span<const HeldBlock> held);
  // The most of `length` positions that a sequence could begin with, if each of these blocks stood
  // behind the one before: all is there that windows of the next position show.
  int64_t usable(std::span<const HeldBlock> blocks, int64_t length) const;
  // These, too, throw kInvalid for a sequence that is not open, and truncate() for more positions
  // than it has.
  void close(SequenceId sequence);
  int64_t length(SequenceId sequence) const;           // cached positions
  int64_t capacity(SequenceId sequence) const;         // positions it was opened for
  void truncate(SequenceId sequence, int64_t length);  // forgets positions >= length
  // Truncates, and gives back or adds reserved pages so that `capacity` positions have theirs.
  // Throws kCapacity when pages are exhausted, kInvalid for a length that the sequence does not
  // have or more than `capacity`, and nothing has changed; can_resize() is false then.
  void resize(SequenceId sequence, int64_t length, int64_t capacity);
  bool can_resize(SequenceId sequence, int64_t length, int64_t capacity) const;
  // Reserves pages for `capacity` positions, if there are so many; whether it has them now. Waits
  // for no step. Throws kInvalid for more than the plan's context.
  bool grow(SequenceId sequence, int64_t capacity);
  // Whether the sequence could be cut back to `length` positions, or forked or saved there. Layers
  // with a window may have given up what its next position would see; those calls throw kInvalid
  // then. Never after a step for the length before it.
  bool continues(SequenceId sequence, int64_t length) const;

  // Moves all KV of a sequence to host memory, or back to the accelerator, and keeps what it adds
  // there; returns how many blocks were copied. Blocks that it shares stay with the others. Waits
  // for all steps. A sequence whose KV lies on the accelerator loses its oldest blocks to host
  // memory one by one where the pool runs full; one in host memory becomes such a sequence by a
  // step of several of its tokens, or where host memory has no block for it. can_move(): whether
  // there is room. Throws kInvalid where the plan has no pages in host memory or the CPU does not
  // attend there, kCapacity without room, and nothing has changed; kDevice for a lost device.
  int64_t move(SequenceId sequence, KvSide side);
  bool can_move(SequenceId sequence, KvSide side) const;
  KvSide side(SequenceId sequence) const;
  bool moves() const;  // whether the plan lets sequences move
  // Blocks that may be added on the accelerator before others must leave, and while it is empty; of
  // a sequence, those that lie there, and those that a step of so many tokens adds there.
  int64_t near_room() const;
  int64_t near_most() const;
  int64_t near_blocks(SequenceId sequence) const;
  int64_t near_blocks(std::span<const HeldBlock> held) const;
  int64_t near_wanted(SequenceId sequence, int64_t tokens) const;
  // Likewise in host memory, of blocks that are free there.
  int64_t far_room() const;
  int64_t far_wanted(SequenceId sequence, int64_t tokens) const;
  // Moves held blocks to host memory, the first ones of a prefix before others. Throws kCapacity
  // where one of those on the accelerator is anyone else's, too, or host memory has no room;
  // can_leave() is false then.
  void leave(std::span<const HeldBlock> held);
  bool can_leave(std::span<const HeldBlock> held) const;

  // Appends each input's tokens to its sequence and returns the logits asked for,
  // [outputs, vocab_size] in input order, valid until the next step. Everything is checked before
  // anything changes. Throws kInvalid for a sequence that is not open or occurs twice and for
  // tokens outside of the vocabulary, kCapacity beyond a sequence's capacity, limits.step_tokens
  // tokens or limits.step_outputs outputs; kIo where mapped weights have changed or those on disk
  // cannot be read, kDevice. kInvalid while submitted steps are not collected.
  std::span<const float> step(std::span<const StepInput> inputs);

  // step() in two halves, so that the CPU works on one step while the accelerator is at another: at
  // most steps_ahead() may be submitted and not yet collected, in that order. A step may continue a
  // sequence of one before it. Closing or truncating a sequence waits for all of them. submit()
  // throws kCapacity beyond steps_ahead(), collect() kInvalid where nothing was submitted.
  //
  // Where the engine splits(), the last `second` inputs may be a sub-batch of their own, each of
  // one token: the two take turns, so that the CPU attends to far KV of one while the accelerator
  // computes the other. Throws kInvalid for others.
  int64_t steps_ahead() const;
  int64_t in_flight() const;
  bool splits() const;
  void submit(std::span<const StepInput> inputs, size_t second = 0);
  std::span<const float> collect();  // of the oldest; valid until the next call that runs a step

  // Calls work(i, thread) once for each 0 <= i < count, on the threads that decode; `thread` is
  // less than stats().threads. Steps may be on their way. `work` must not throw nor call the
  // engine.
  void share(int64_t count, const std::function<void(int64_t, int)>& work);

  // Appends any number of tokens in as many steps as needed; `consume` gets the logits rows as they
  // come, [rows, vocab_size]. Throws as step() does.
  void forward(SequenceId sequence, std::span<const int32_t> tokens, StepInput::Outputs outputs,
               const std::function<void(std::span<const float>)>& consume);

  class HELM_LOCAL Impl;

 private:
  HELM_LOCAL Impl& used() const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace helm
