// Requests served on a clock of its own and without an engine: scheduler, modes and room as the
// runtime has them, seconds as the predictor's tables have them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/ranking.h"
#include "serve/scheduler.h"
#include "serve/step_mode.h"

namespace helm::test {

// A model of equal layers on a GPU beside a CPU, as rates.
struct VirtualMachine {
  std::string name;
  int64_t layers;
  double layer_bytes, layer_weights;  // of a layer's matrices
  double position_bytes;              // K and V of a layer
  double gpu_bytes_per_s, gpu_flops, gpu_attention_flops, cpu_bytes_per_s, link_bytes_per_s;
  double ask_s;  // until the CPU begins with a layer
  double head_bytes;
  double width;                     // query heads times their size
  int64_t near_tokens, far_tokens;  // room
  int64_t step_tokens, step_outputs;

  PredictorTables tables() const;
};

struct VirtualRequest {
  int64_t prompt = 0, output = 0;
};

struct VirtualResult {
  double seconds = 0;
  int64_t steps = 0, to_host = 0, back = 0, parked = 0;
  std::vector<int64_t> modes;  // steps, by StepMode
  int64_t most_idle = 0;       // steps that a decoding request was passed over in a row
  int64_t most_far = 0;        // requests at once
};

constexpr int64_t kVirtualPage = 16;

// All requests come at once. all_far: none lives near, as with FastDecode.
VirtualResult serve(const VirtualMachine& machine, const std::vector<VirtualRequest>& requests,
                    ModeSet modes, bool all_far = false);
// The same by SwiftLLM's rule: a step has prompts or decodes, nothing is far.
double unmixed_s(const VirtualMachine& machine, const std::vector<VirtualRequest>& requests);

}  // namespace helm::test
