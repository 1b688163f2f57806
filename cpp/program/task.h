// A step as a list of tasks on lanes, in the order in which they are enqueued. Plain data.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "helm/plan.h"

namespace helm {

struct Task {
  enum class Verb : uint8_t {
    kRun,      // units as one stage
    kBefore,   // of a layer whose KV pages are spread: up to attention, keys and values appended
    kNear,     // attention to the pages of the layer's device
    kFar,      // attention to its other pages
    kAfter,    // both merged, and the rest of the layer
    kCopy,     // rows of a value cross
    kVisit,    // weights of a group, a layer or a unit, come into a buffer
    kCached,   // KV pages of a layer that visits come along
    kWritten,  // and go back
    kPage,     // a far page comes into a buffer
    kRead,     // weights of a unit come from disk
  };
  // Computing, a direction of the link, or the disk.
  enum class Lane : uint8_t { kDevice, kUp, kDown, kDisk };

  Verb verb;
  Lane lane;
  DeviceIndex device;    // that has the lane
  size_t begin, end;     // units; of a copy: those of the layer that it belongs to, or none
  ValueIndex value = 0;  // of a copy
  bool aside = false;    // not in the queue of the device's stages
  bool each = false;     // with the task behind it, for every far page in turn
  std::vector<int32_t> after = {};  // tasks of other lanes that must have ended, ascending

  bool runs() const { return verb <= Verb::kAfter; }
};

// What steps of one kind do.
struct Program {
  // Where attention to far pages takes place: they visit, or the CPU attends, or each to some.
  enum class Far : uint8_t { kNone, kVisit, kOnCpu, kBoth };

  bool visits = false;  // layers in host memory visit a device
  Far far = Far::kNone;
  bool pages_visit() const { return far == Far::kVisit || far == Far::kBoth; }
  bool cpu_attends() const { return far == Far::kOnCpu || far == Far::kBoth; }
  // A stage finds values where an earlier one has left them: no other step may run in between.
  bool whole = false;
  std::vector<Task> tasks;

  // Whether it can take turns with itself: the CPU attends in it, and it brings and reads nothing
  // whose order counts.
  bool takes_turns() const {
    return far == Far::kOnCpu && !visits && !whole && std::ranges::none_of(tasks, [](auto& one) {
             return one.verb == Task::Verb::kVisit || one.verb == Task::Verb::kRead;
           });
  }
  // Whether weights come to a device.
  bool brings() const {
    return std::ranges::any_of(tasks, [](auto& one) { return one.verb == Task::Verb::kVisit; });
  }
};

}  // namespace helm
