// Weights in host memory of what a device runs: they go up group after group into buffers in turn.
// A group is a unit of the device, or, in steps of many tokens, a layer that lies in host memory or
// on disk, as a whole or in part. The KV pages that such a layer needs go with it, and what it has
// added comes back.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/pinned_memory.h"
#include "program/buffers.h"
#include "program/ring.h"
#include "weights/store.h"

namespace helm {

class Visits {
 public:
  // program: one in which weights visit; kv: the pages in host memory. Everything must outlive the
  // visits, which page-lock what they copy.
  Visits(const Plan& plan, const Program& program, const Weights& weights, std::span<std::byte> kv,
         Account& account);

  int64_t bytes() const { return ring_.bytes() + pages_.bytes(); }
  // Of the weights and pages in host memory, those that could not be page-locked.
  int64_t pageable_bytes() const { return pinned_.refused_bytes(); }
  // Whether the room for pages here holds those of the step's sequences.
  bool holds(const StepView& step) const;

  // Binds a stage to what visits of the group that begins with a unit.
  void bind(size_t unit, StageSpec& spec) const;
  Ring::Buffer& buffer(size_t unit) { return ring_[groups_[unit].turn]; }
  // Enqueue a group's weights, or those of its task that begins with a unit, and its pages. What
  // comes from disk is waited for.
  void load(size_t unit, Stream& stream);
  void move_pages(size_t unit, bool up, const StepViews& views, Stream& stream);
  // Waits until what came from disk last has gone up; then other units may be read to where it lay.
  void give_back();

 private:
  struct Group {
    Placed tensors;  // that the device lacks, within a buffer
    size_t turn = 0;
    std::vector<size_t> entries;  // of KV, in host memory
  };
  struct Load {                            // of a task
    size_t group = 0, first = 0, end = 0;  // of the group's tensors
    bool reads = false;                    // some of them from disk
  };
  int64_t bytes_of(TensorIndex tensor) const { return plan_.bytes(*plan_.slice(tensor, kCpu)); }

  const Plan& plan_;
  const Weights& weights_;
  std::span<std::byte> host_kv_;
  DiskRing* disk_;             // null where no weights lie on disk
  std::vector<Group> groups_;  // by first unit
  std::vector<Load> loads_;    // by first unit of its task
  Ring ring_;
  DeviceMemory pages_;  // [visit_pages, KV heads] units
  PinnedMemory pinned_;
  std::unique_ptr<Event> gone_up_;      // the unit that came from disk last
  std::optional<size_t> to_give_back_;  // that unit
};

}  // namespace helm
