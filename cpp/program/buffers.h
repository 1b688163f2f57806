// What stages of a device are bound to besides weights, and what a step gives them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.h"
#include "plan/stages.h"
#include "program/task.h"

namespace helm {

// Of a split step, which has two; any other has the first alone.
enum SubBatch : uint8_t { kFirstBatch, kSecondBatch };

class DeviceBuffers {
 public:
  DeviceBuffers() = default;
  // For units at these places, with a KV cache of so many bytes; with `more` values. Of values
  // there is a second set, of split_rows rows, if there are any.
  DeviceBuffers(const Plan& plan, DeviceIndex device, const std::vector<DeviceIndex>& places,
                std::span<const ValueIndex> more, int64_t kv_bytes, int64_t split_rows,
                Account& account);

  // What a stage is bound to, but for its units and weights.
  StageSpec spec(const Plan& plan, SubBatch batch = kFirstBatch) const;

  DeviceAddress value(ValueIndex index, SubBatch batch = kFirstBatch) const {
    return values_[batch][static_cast<size_t>(index)];
  }
  DeviceAddress kv() const { return kv_.address(); }
  int64_t kv_bytes() const { return kv_.bytes(); }
  int64_t activations_bytes() const { return activations_.bytes(); }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  DeviceMemory kv_, activations_, workspace_;
  // By ValueIndex; kNull where the device does not use it.
  std::array<std::vector<DeviceAddress>, 2> values_;
};

// The step's blocks that lie in host memory.
struct FarRuns {
  std::vector<int64_t> blocks;  // by run: so many from the first
  std::vector<int32_t> pages;   // [runs][blocks, entries]
  size_t on_cpu = 0;            // the last runs, to whose blocks the CPU attends; others visit

  bool visit() const {
    const auto others = static_cast<std::ptrdiff_t>(blocks.size() - on_cpu);
    return std::any_of(blocks.begin(), blocks.begin() + others, [](int64_t n) { return n > 0; });
  }
};

// One step's rows, kept until its last stage has run.
struct StepRows {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> output_rows;
  std::vector<SequenceRun> runs;
  std::vector<int32_t> pages;  // of the runs, [blocks, entries] each
  FarRuns far;
  uint64_t number = 0;  // of the step

  void reserve(const Limits& limits);
  void clear();
  StepView view() const { return {token_ids, positions, output_rows, runs, runs, number}; }
};

// A step as stages see it: the same rows, with the KV pages that each is to find.
class StepViews {
 public:
  // A sequence's pages while its layers in host memory visit a device.
  struct Visit {
    const int32_t* host;  // [blocks, entries]
    int64_t first;        // place of block 0 in the room for visits
    int64_t existing;     // blocks with positions from before the step
    int64_t begin, end;   // blocks that the step writes to
  };
  struct FarPage {
    const int32_t* pages;    // in host memory, by KV entry
    int64_t block;           // of its sequence
    int64_t first_position;  // of the sequence's rows
  };

  // For a program. visiting: by KV entry, whether it visits, where the program's do. Rows and
  // program are referred to until the next call.
  void make(const StepRows& rows, const KvSpec& kv, const Program& program,
            const std::vector<bool>& visiting);

  StepView on_cpu, on_device;
  StepView of_visits;   // layers in host memory, on a device
  StepView far_on_cpu;  // the last rows, as the CPU attends to their far pages
  std::vector<Visit> visits;
  std::vector<FarPage> far_pages;
  // Of a far page that has come to the device, as the only page.
  StepView of_far_page(size_t index) const {
    return on_device.piece(on_cpu.runs.size() + index, 1);
  }

 private:
  void bring_pages(const KvSpec& kv, const std::vector<bool>& visiting);
  void part_pages(const FarRuns& far, const KvSpec& kv);

  std::vector<SequenceRun> runs_;  // on a device; then one for each far page
  std::vector<SequenceRun> far_runs_, visiting_runs_;
  std::vector<int32_t> table_;  // with the pages of entries that visit
  std::vector<int32_t> only_;   // 0 for every entry
};

}  // namespace helm
