// What a plan says of the time that steps take, and the modes that a step may have. Data alone.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace helm {

// How a step treats decoding requests whose KV is far, in host memory. Near: they wait. Joint: one
// batch, in each layer the CPU attends for them. Split: two sub-batches, and the CPU attends for
// one of them while the accelerator computes the other (NEO, Jiang et al. 2025).
enum class StepMode : uint8_t { kNear, kJoint, kSplit };

inline constexpr std::array<std::string_view, 3> kStepModeNames = {"near", "joint", "split"};
// Those that the engine executes; nobody chooses or promises another.
inline constexpr std::array kExecutedModes = {StepMode::kNear, StepMode::kJoint, StepMode::kSplit};

constexpr std::string_view mode_name(StepMode mode) {
  return kStepModeNames[static_cast<size_t>(mode)];
}

// Of a mode that steps had: how many, and of those for which the plan has tables what these said
// that they take, beside what they took.
struct ModeUse {
  int64_t steps = 0;
  double predicted_s = 0, measured_s = 0;
};
using ModeUses = std::array<ModeUse, kStepModeNames.size()>;  // by StepMode

// Attention in all layers that have the same window. Seconds are of all these layers together.
struct AttentionTimes {
  int64_t window = 0;  // positions that a query sees; 0: all
  int64_t layers = 0;  // that lie on the accelerator
  // For each position that a decoding row sees:
  double cpu_s = 0;                            // in the layers that lie on the CPU
  double near_s = 0;                           // in the accelerator's, by the accelerator
  double far_s = 0;                            // in the accelerator's, by the CPU
  double near_beside_s = 0, far_beside_s = 0;  // the same while both devices attend
  // [rows] for a query and a key of a prompt's chunk of so many rows, of either device's layers
  std::vector<double> cpu_pair_s, pair_s;
};

// Seconds of a step's parts.
struct PredictorTables {
  std::vector<int64_t> rows;  // ascending, from 1
  // [rows] all but attention and head of a step of so many rows, by device; crossings are the CPU's
  std::vector<double> cpu_s, accelerator_s;
  std::vector<double> accelerator_beside_s;  // [rows] while the CPU attends
  std::vector<double> head_s;                // [rows] of so many rows of logits
  std::vector<AttentionTimes> attention;
  double step_s = 0;        // of any step
  double prompt_row_s = 0;  // of attention, for each row of a prompt
  // Of each layer of the accelerator in a step for whose far rows the CPU attends:
  double parts_s = 0;                     // as it runs in parts
  double near_part_s = 0;                 // as near attention is a part, beside the CPU
  double ask_s = 0, ask_row_s = 0;        // until the CPU can attend, and for each far row
  double answer_s = 0, answer_row_s = 0;  // until its results are there, likewise
  // Of moving a block of KV between the memories.
  double block_to_host_s = 0, block_to_accelerator_s = 0;
};

}  // namespace helm
