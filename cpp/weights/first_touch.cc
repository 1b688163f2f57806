#include "weights/first_touch.h"

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <variant>

#include "base/affinity.h"
#include "cpu/experts.h"
#include "cpu/linear_rows.h"

namespace helm {
namespace {

void add_shares(const Plan& plan, const UnitSpec& unit, const LinearOp& op, int members,
                std::vector<std::vector<TensorShare>>& shares) {
  const cpu::LinearRows all =
      cpu::LinearRows::of(plan, op, [&](TensorIndex weight) { return plan.format(unit, weight); });
  for (size_t i = 0; i < op.parts.size(); ++i) {
    const auto tensor = static_cast<size_t>(op.parts[i].weight);
    std::vector<TensorShare>& own = shares[tensor];
    if (!own.empty()) continue;  // belongs to the first op that reads it
    for (int member = 0; member < members; ++member) {
      const Team::Part rows = all.decode_part(member, members, i);
      if (rows.begin < rows.end) own.push_back({rows.begin, rows.end, member});
    }
  }
}

// Of experts every member has a part of each one's rows.
void add_shares(const Plan& plan, const ExpertsOp& op, int members,
                std::vector<std::vector<TensorShare>>& shares) {
  const auto add = [&](TensorIndex index, int64_t rows, int64_t together) {
    if (index == kNoTensor) return;
    std::vector<TensorShare>& own = shares[static_cast<size_t>(index)];
    if (!own.empty()) return;
    const int64_t all = plan.tensors[static_cast<size_t>(index)].rows();
    for (int64_t first = 0; first < all; first += rows * together) {
      for (int member = 0; member < members; ++member) {
        const auto [begin, end] = cpu::expert_rows(member, members, rows);
        if (begin == end) continue;
        own.push_back({first + begin * together, first + end * together, member});
      }
    }
  };
  add(op.gate, op.size, op.layout == GateUp::kNeighbours ? 2 : 1);
  add(op.up, op.size, 1);
  add(op.down, plan.values[static_cast<size_t>(op.out)].width, 1);
}

// Items in the order in which they are to be done, taken one by one.
struct Queue {
  std::vector<size_t> items;
  std::atomic<size_t> taken{0};

  template <typename Body>
  void work(const std::atomic<bool>& stop, const Body& body) {
    while (!stop.load()) {
      const size_t i = taken.fetch_add(1);
      if (i >= items.size()) return;
      body(items[i]);
    }
  }
};

}  // namespace

std::vector<std::vector<TensorShare>> decode_shares(const Plan& plan,
                                                    const std::vector<bool>& chosen, int members) {
  std::vector<std::vector<TensorShare>> shares(plan.tensors.size());
  for (size_t u = 0; u < plan.units.size(); ++u) {
    if (!chosen[u]) continue;
    for (const Op& op : plan.units[u].ops) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) {
        add_shares(plan, plan.units[u], *linear, members, shares);
      } else if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
        add_shares(plan, *experts, members, shares);
      }
    }
  }
  for (size_t i = 0; i < shares.size(); ++i) {
    if (shares[i].empty()) shares[i].push_back({0, plan.tensors[i].rows(), kAnyone});
  }
  return shares;
}

std::vector<int> nodes_of(ThreadPool& threads) {
  std::vector<int> nodes(static_cast<size_t>(threads.size()), 0);
  if (threads.cpus().empty()) return nodes;
  threads.run([&](Team& team) { nodes[static_cast<size_t>(team.worker())] = current_node(); });
  return nodes;
}

void run_owned(ThreadPool& threads, const std::vector<int>& owners, const std::vector<int>& nodes,
               const std::function<void(size_t item, Team& team)>& body) {
  const int members = threads.size();
  Queue anyone_s;
  const auto own = std::make_unique<Queue[]>(static_cast<size_t>(members));
  for (size_t i = 0; i < owners.size(); ++i) {
    Queue& queue = owners[i] == kAnyone ? anyone_s : own[static_cast<size_t>(owners[i])];
    queue.items.push_back(i);
  }
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  threads.run([&](Team& team) {
    const auto work = [&](Queue& queue) {
      queue.work(failed, [&](size_t item) { body(item, team); });
    };
    const auto node = [&](int member) { return nodes[static_cast<size_t>(member)]; };
    try {
      work(anyone_s);
      for (int i = 0; i < members; ++i) {
        const int member = (team.worker() + i) % members;
        if (node(member) == node(team.worker())) work(own[static_cast<size_t>(member)]);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
      failed = true;
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace helm
