// What a stage reads of memory in a step, for devices whose memory has a given rate.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace helm {

// Weights and KV together, added up op by op, so that what two ops read counts twice:
// - An op that writes rows, of tokens or of outputs, and has none in this step reads nothing.
// - A tensor that is read as a whole counts format_bytes() of its slice, vectors too.
// - A table counts its share for each row looked up: format_bytes() / rows, rounded down, for each
//   token.
// - Attention counts K and V, with their scales, of the positions that a run sees: from the first
//   one in the window of its first token, or 0, up to its last token; of those, what lies in the
//   blocks that the run is to attend to. No padding of pages counts, and no position twice.
// - Activations count nothing.
// - What the CPU holds on a memory node that the plan names counts node_cost times.
int64_t stage_bytes(const StageSpec& stage, const StepView& step, double node_cost = 1);

}  // namespace helm
