// What stages need of a device's memory as scratch, counted before there is a plan, by the formulas
// with which the engine allocates it. Allocates and runs nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "helm/plan.h"

namespace helm {

// Figures depend on no machine: they are those of whatever processor or GPU takes the most. A call
// changes the object, so threads do not share one.
class HELM_API Footprint {
 public:
  // What a footprint is asked for: limits, the pages of the KV cache, threads of the CPU, whether
  // an accelerator may have packed weights.
  struct Setting {
    Limits limits;
    DType kv_dtype = DType::kF32;
    int64_t page_tokens = 1;
    int threads = 1;
    bool packed = false;
  };

  // graph: JSON with the keys `kv` (layers, kv_heads, head_dim), `rope`, `tensors`, `values`,
  // `units` and `logits` of a plan; tensors have no source, units no device. Of units that differ
  // in names and layer alone, one is enough. Throws Error{kInvalid} that names the field.
  explicit Footprint(std::string_view graph);
  ~Footprint();
  Footprint(const Footprint&) = delete;
  Footprint& operator=(const Footprint&) = delete;

  // Bytes of scratch of a device of that kind whose stages have these units, 0 without units; 64
  // TiB where it would be more. Throws Error{kInvalid} for a unit that the graph lacks, or a
  // setting out of range.
  int64_t workspace(std::span<const std::string> units, DeviceKind device, const Setting& setting);
  // Likewise of the CPU, which attends to KV pages in host memory for these units of the
  // accelerator.
  int64_t far_workspace(std::span<const std::string> units, const Setting& setting);

 private:
  class HELM_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace helm
