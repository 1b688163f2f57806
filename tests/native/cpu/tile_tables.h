// Kernel tables that show what the amx tier does where the processor has no tile registers.
#pragma once

#include "cpu/kernels/kernels.h"

namespace helm::test {

// The scalar tier with the amx tier's products over TileRegisters.
const cpu::KernelTable& emulated_amx();

// The amx tier itself, its tile instructions carried out by a handler of SIGILL until the test case
// ends; null where the processor has them, or lacks the AVX512-BF16 around them, or no build does.
const cpu::KernelTable* trapped_amx();

}  // namespace helm::test
