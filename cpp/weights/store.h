// The slices of a plan on its devices: read from files to their final place, or used where they
// already lie. Never two copies on one device.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "base/mapped_file.h"
#include "base/memory_node.h"
#include "base/thread_pool.h"
#include "cpu/kernels/kernels.h"
#include "device/memory.h"
#include "helm/engine.h"
#include "helm/plan.h"
#include "weights/disk_ring.h"
#include "weights/packed.h"

namespace helm {

// Tensors and the offsets of their places in one block of device memory.
using Placed = std::vector<std::pair<TensorIndex, int64_t>>;
// In the formats of the device that holds them.
Placed placed_in_order(const Plan& plan, const std::vector<TensorIndex>& tensors,
                       DeviceIndex device);

class Weights {
 public:
  // Reads with all members of `threads`, what goes to the CPU's memory with the member that reads
  // it in decode. `accelerator` is null for a plan without one. Throws Error{kIo} for a file that
  // is missing or too short, Error{kInvalid} for a bound tensor that does not fit the plan
  // and for a format that a device lacks, Error{kMemory} when a budget or a memory is too small.
  Weights(const Plan& plan, const EngineOptions& options, const cpu::KernelTable& kernels,
          ThreadPool& threads, Account& cpu, Account* accelerator);

  // By TensorIndex; kNull for tensors that no unit of the device uses.
  const std::vector<Weight>& on(DeviceIndex device) const {
    return on_[static_cast<size_t>(device)];
  }
  // Those that steps read from disk, or null.
  DiskRing* disk() const { return disk_.get(); }
  // As the plan counts them: those in files and with their owners too, without what aligns others.
  int64_t cpu_bytes() const { return cpu_bytes_.bytes(); }
  int64_t accelerator_bytes() const { return accelerator_memory_.bytes(); }
  // Those on the CPU that were copied; others lie in files or with their owners.
  int64_t copied_bytes() const;
  const std::map<int, int64_t>& node_bytes() const { return node_bytes_; }  // see EngineStats
  // Scales that lie in mapped files are looked at only where a step's logits are not finite, once:
  // throws Error{kIo} that names file, tensor and row then.
  void check_scales(std::span<const float> logits);
  // Throws Error{kIo} where a mapped file is not as it was: see MappedFile.
  void check_files(bool used) const;
  bool huge_pages() const;
  std::optional<int64_t> huge_page_bytes() const { return huge_page_bytes_; }  // see EngineStats

 private:
  class Load;

  std::vector<std::vector<Weight>> on_;              // by device, then tensor
  std::vector<std::shared_ptr<void>> owners_;        // of tensors used where they lie
  std::vector<std::shared_ptr<MappedFile>> mapped_;  // or in files
  std::vector<PackedMatrix> unseen_;                 // there, whose scales nobody has looked at
  Claim cpu_bytes_;
  std::map<int, Arena> arenas_;  // by memory node, kAnyNode among them
  std::map<int, int64_t> node_bytes_;
  DeviceMemory accelerator_memory_;
  Claim ring_bytes_;
  std::unique_ptr<DiskRing> disk_;
  std::optional<int64_t> huge_page_bytes_;
};

}  // namespace helm
