// What every helm::Device must do, whatever it runs on: each function fails doctest checks.
#pragma once

#include <functional>
#include <memory>

#include "device/device.h"
#include "tiny_model.h"

namespace helm::test {

// Opens a device that hands out at most `limit_bytes` (0: no limit).
using DeviceFactory = std::function<std::unique_ptr<Device>(int64_t limit_bytes)>;

// Refused allocations name purpose and sizes and change nothing; everything given back is free
// again.
void conform_allocation(const DeviceFactory& open);

// Bytes survive a round trip at odd sizes and offsets.
void conform_copies(const DeviceFactory& open);

// Work waits for events of other streams; the host waits for events and streams; other streams go
// on.
void conform_ordering(const DeviceFactory& open);

// Every dense format is taken; a stage with weights in a format that is not taken is refused by the
// format's name.
void conform_formats(const DeviceFactory& open);

// The logits of a small model: prompts in chunks, then several sequences decoding side by side and
// a new prompt among them, against a scalar oracle. `narrows_inputs`: the device rounds inputs of
// products to the weights' dtype, a GPU where a step has many rows, a CPU always or never.
struct StageCase {
  TinyShape shape;
  bool narrows_inputs = false;
};
void conform_stage(const DeviceFactory& open, const StageCase& test);

// Attention in parts (append, reset, attend, merge) over pages shared out in every way, in decode
// and prefill steps, against a scalar oracle. attention_conformance.cc.
// inputs: what the device rounds scaled queries and softmax weights to. weights: what it may round
// weights alone to, of sequences with several tokens in a step.
void conform_attention_pieces(const DeviceFactory& open, const TinyShape& shape,
                              DType inputs = DType::kF32, DType weights = DType::kF32);

// The logits of every step of conform_stage, for comparisons between devices and settings.
std::vector<std::vector<float>> stage_logits(const DeviceFactory& open, const TinyShape& shape);

}  // namespace helm::test
