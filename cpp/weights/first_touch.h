// Loading so that each member of the team is the first to touch the memory that it will read: the
// system then takes it from that member's node. Knows nothing of files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/thread_pool.h"
#include "helm/plan.h"

namespace helm {

inline constexpr int kAnyone = -1;

// Rows [begin, end) of a tensor and the member that reads them in decode. A vector has rows of one
// element.
struct TensorShare {
  int64_t begin, end;
  int member;  // or kAnyone
};

// By TensorIndex: shares that cover the tensor, in order. Matrices of the linear ops of the units
// with `chosen`, which the CPU runs, belong to whoever starts with their rows (cpu::LinearRows),
// and so do those of experts (cpu::expert_rows); everything else to anyone.
std::vector<std::vector<TensorShare>> decode_shares(const Plan& plan,
                                                    const std::vector<bool>& chosen, int members);

// By member: the memory node that it is on while at work; all 0 where members are not pinned and so
// may be anywhere.
std::vector<int> nodes_of(ThreadPool& threads);

// Calls body(item, team) once for every item, on all members. Items that are anyone's come first,
// in order; then each member does its own in order, and then helps the others of its node, as
// memory there is as near to them. owners: by item; nodes: by member. The first failure stops
// everyone and is rethrown.
void run_owned(ThreadPool& threads, const std::vector<int>& owners, const std::vector<int>& nodes,
               const std::function<void(size_t item, Team& team)>& body);

}  // namespace helm
