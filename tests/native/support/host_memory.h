// An account of the host's memory without a limit, for tests of what takes from one.
#pragma once

#include "base/thread_pool.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "device/memory.h"
#include "helm/plan.h"

namespace helm::test {

struct HostMemory {
  explicit HostMemory(ThreadPool& threads)
      : device(cpu::select_kernels(), threads), account(device, Plan::kUnlimited) {}

  cpu::CpuDevice device;
  Account account;
};

}  // namespace helm::test
