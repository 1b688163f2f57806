// Where weights are placed: each member loads what it reads, on the node that it is pinned to.
#include "weights/first_touch.h"

#include <doctest/doctest.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "affinity.h"
#include "cpu/experts.h"
#include "cpu/stage.h"
#include "helm/engine.h"
#include "tiny_model.h"
#include "weights/store.h"

namespace {

using helm::kAnyone;
using helm::LinearOp;
using helm::Plan;
using helm::Team;
using helm::TensorShare;
using helm::ThreadPool;
using helm::test::large_shape;
using helm::test::one_cpu_each;
using helm::test::tiny_model;
using helm::test::TinyShape;

// --- who reads what ------------------------------------------------------------------------------

// What a kernel was called with, by the member whose scratch it was given. The first call of each
// waits for all others', so that nobody helps before everybody has begun with its own rows.
struct Calls {
  struct Call {
    uintptr_t weights;
    int64_t rows;
    int64_t slice, slices;
    bool same_input;
  };
  explicit Calls(int members) : scratch(static_cast<size_t>(members)), of(scratch.size()) {}

  std::vector<std::byte> scratch;
  std::vector<std::vector<Call>> of;  // [members]
  std::atomic<size_t> started{0};
};
Calls* calls = nullptr;  // kernels are plain functions

void record(const helm::cpu::MatmulArgs& args) {
  const auto member =
      static_cast<size_t>(static_cast<const std::byte*>(args.scratch) - calls->scratch.data());
  std::vector<Calls::Call>& own = calls->of[member];
  own.push_back(
      {reinterpret_cast<uintptr_t>(args.w), args.rows, args.slice, args.slices, args.same_input});
  if (own.size() > 1) return;
  ++calls->started;
  while (calls->started.load() < calls->of.size()) std::this_thread::yield();
}

// A decode step of one op on fake weights, tensor i at (i + 1) << 40.
void run_recorded(const Plan& plan, const LinearOp& op, ThreadPool& pool, Calls& into) {
  helm::cpu::KernelTable kernels = *helm::cpu::kernels_scalar();
  for (auto& matmul : kernels.matmul) matmul = record;
  helm::cpu::Bindings bindings{plan,    {},     {}, kernels, helm::cpu::select_integer_kernels(),
                               {},      {},     {}, {},      {},
                               nullptr, nullptr};
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const auto held = plan.slice(static_cast<helm::TensorIndex>(i), false);
    bindings.weights.push_back({static_cast<helm::DeviceAddress>((i + 1) << 40), held->format});
  }
  std::vector<std::vector<float>> values;
  for (const helm::ValueSpec& value : plan.values) {
    values.emplace_back(static_cast<size_t>(value.width));
    bindings.values.push_back(values.back().data());
  }
  for (std::byte& cell : into.scratch) bindings.scratch.push_back(&cell);
  const std::vector<int32_t> zero{0};
  const helm::StepView step{zero, zero, zero, {}};
  const auto bound = helm::cpu::bind_op(op, bindings);
  calls = &into;
  pool.run([&](Team& team) { bound->run(step, team); });
  calls = nullptr;
}

helm::Format& format_of(Plan& plan, helm::TensorIndex tensor) {
  return const_cast<helm::SliceSpec*>(plan.slice(tensor, false))->format;
}

std::vector<LinearOp> linear_ops(const Plan& plan) {
  std::vector<LinearOp> ops;
  for (const helm::UnitSpec& unit : plan.units) {
    for (const helm::Op& op : unit.ops) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) ops.push_back(*linear);
    }
  }
  return ops;
}

}  // namespace

TEST_CASE("weights belong to the member whose decode begins with them") {
  for (const int members : {1, 2, 3, 5}) {
    const Plan plan = Plan::from_json(tiny_model(large_shape(members)).plan);
    const auto shares =
        helm::decode_shares(plan, std::vector<bool>(plan.units.size(), true), members);
    ThreadPool pool(members);
    const std::vector<LinearOp> ops = linear_ops(plan);
    REQUIRE(ops.size() == 5);
    for (const LinearOp& op : ops) {
      Calls seen(members);
      run_recorded(plan, op, pool, seen);
      std::map<int, uintptr_t> begins;  // by member: where its share starts
      int64_t rows = 0;
      for (const LinearOp::Part& part : op.parts) {
        const auto tensor = static_cast<size_t>(part.weight);
        for (const TensorShare& share : shares[tensor]) {
          const auto offset =
              static_cast<uintptr_t>(share.begin * plan.tensors[tensor].cols()) * sizeof(float);
          begins.emplace(share.member, ((tensor + 1) << 40) + offset);
        }
        rows += plan.tensors[tensor].shape[0];
      }
      REQUIRE(begins.size() == static_cast<size_t>(members));
      std::map<uintptr_t, std::vector<int>> slices;  // how often each ran, by where its rows start
      for (int member = 0; member < members; ++member) {
        const auto& own = seen.of[static_cast<size_t>(member)];
        REQUIRE_FALSE(own.empty());
        CHECK(own[0].weights == begins.at(member));
        for (const Calls::Call& call : own) {
          std::vector<int>& ran = slices[call.weights];
          if (ran.empty()) {
            ran.resize(static_cast<size_t>(call.slices));
            rows -= call.rows;
          }
          REQUIRE(ran.size() == static_cast<size_t>(call.slices));
          ++ran[static_cast<size_t>(call.slice)];
        }
      }
      CHECK(rows == 0);
      for (const auto& [weights, ran] : slices) {
        CHECK(ran == std::vector<int>(ran.size(), 1));
      }
    }
  }
}

TEST_CASE("of every expert each member has the same rows, those that it starts with") {
  for (const char* layout : {"apart", "halves", "neighbours"}) {
    for (const int members : {1, 3}) {
      TinyShape shape = large_shape(members);
      shape.experts = 4, shape.experts_layout = layout;
      const Plan plan = Plan::from_json(tiny_model(shape).plan);
      const auto shares =
          helm::decode_shares(plan, std::vector<bool>(plan.units.size(), true), members);
      int found = 0;
      for (size_t i = 0; i < plan.tensors.size(); ++i) {
        const helm::TensorSpec& tensor = plan.tensors[i];
        if (tensor.name.find("_of_experts") == std::string::npos) continue;
        ++found;
        const bool gate = tensor.name.find("gate") != std::string::npos;
        const bool halves = gate && shape.experts_layout == "halves";
        const int64_t in_turn = gate && shape.experts_layout == "neighbours" ? 2 : 1;
        const int64_t runs = shape.experts * (halves ? 2 : 1);  // that are split alike
        const int64_t rows = tensor.rows() / runs;
        REQUIRE(rows / in_turn >= 16 * members);
        REQUIRE(shares[i].size() == static_cast<size_t>(runs * members));
        int64_t next = 0;
        for (const TensorShare& share : shares[i]) {
          const auto [begin, end] = helm::cpu::expert_rows(share.member, members, rows / in_turn);
          CHECK(share.begin == next);
          CHECK(share.begin % rows == begin * in_turn);
          CHECK(share.end - share.begin == (end - begin) * in_turn);
          next = share.end;
        }
        CHECK(next == tensor.rows());
      }
      CHECK(found == plan.kv.model_layers() * (shape.experts_layout == "apart" ? 3 : 2));
    }
  }
}

TEST_CASE("an expert's rows are cut between strips, and none is left out") {
  for (const int64_t rows : {1, 16, 40, 768}) {
    for (const int64_t pieces : {1, 2, 3, 8}) {
      int64_t next = 0;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const auto [begin, end] = helm::cpu::expert_rows(piece, pieces, rows);
        CHECK(begin == next);
        CHECK((end % 16 == 0 || end == rows));
        CHECK(end - begin <= (rows / 16 / pieces + 1) * 16);
        next = end;
      }
      CHECK(next == rows);
    }
  }
}

TEST_CASE("a member's pieces have the same input as its last one where weights are of one dtype") {
  for (const bool mixed : {false, true}) {
    Plan plan = Plan::from_json(tiny_model(large_shape(2)).plan);
    ThreadPool pool(2);
    for (const LinearOp& op : linear_ops(plan)) {
      std::map<size_t, int> dtypes;  // by weight
      for (size_t i = 0; i < op.parts.size(); ++i) {
        const helm::TensorIndex weight = op.parts[i].weight;
        helm::Format& format = format_of(plan, weight);
        if (mixed && i % 2 == 1) format = helm::format_of(helm::DType::kBF16);
        dtypes[static_cast<size_t>(weight)] = static_cast<int>(helm::dtype_of(format));
      }
      Calls seen(2);
      run_recorded(plan, op, pool, seen);
      size_t calls = 0;
      for (const auto& own : seen.of) {
        calls += own.size();
        int before = -1;
        for (const Calls::Call& call : own) {
          const int dtype = dtypes.at((call.weights >> 40) - 1);
          CHECK(call.same_input == (dtype == before));
          before = dtype;
        }
      }
      REQUIRE(calls > seen.of.size());  // who is late may find all but its first piece taken
    }
  }
}

TEST_CASE("shares cover every tensor once, and only matrices of chosen units have readers") {
  const Plan plan = Plan::from_json(tiny_model(large_shape(3)).plan);
  for (const bool chosen : {true, false}) {
    const auto shares = helm::decode_shares(plan, std::vector<bool>(plan.units.size(), chosen), 3);
    REQUIRE(shares.size() == plan.tensors.size());
    for (size_t i = 0; i < shares.size(); ++i) {
      int64_t end = 0;
      for (const TensorShare& share : shares[i]) {
        CHECK(share.begin == end);
        CHECK(share.end > share.begin);
        CHECK((share.member == kAnyone) == (!chosen || plan.tensors[i].shape.size() == 1));
        end = share.end;
      }
      CHECK(end == plan.tensors[i].rows());
    }
  }
}

// --- who does what -------------------------------------------------------------------------------

TEST_CASE("members on nodes of their own do what is theirs, and share what is anyone's") {
  ThreadPool pool(3);
  std::vector<int> owners;
  for (int i = 0; i < 60; ++i) owners.push_back(i % 4 == 3 ? kAnyone : i % 4);
  std::vector<std::atomic<int>> by(owners.size());
  helm::run_owned(pool, owners, {0, 1, 2},
                  [&](size_t item, Team& team) { by[item] += 10 + team.worker(); });
  for (size_t i = 0; i < owners.size(); ++i) {
    CHECK(by[i] >= 10);
    CHECK(by[i] < 13);  // once
    if (owners[i] != kAnyone) CHECK(by[i] == 10 + owners[i]);
  }
}

TEST_CASE("who is done helps those on its node") {
  ThreadPool pool(3);
  const std::vector<int> owners{0, 0, 0, 0, 2, 2};
  std::vector<std::atomic<int>> by(owners.size());
  std::atomic<bool> helped{false};
  helm::run_owned(pool, owners, {7, 7, 4}, [&](size_t item, Team& team) {
    by[item] += 10 + team.worker();
    if (owners[item] != 0) return;
    if (team.worker() == 1) helped = true;
    while (!helped.load()) std::this_thread::yield();  // member 0 gets no further without help
  });
  std::set<int> workers;
  for (size_t i = 0; i < 4; ++i) workers.insert(by[i].load());
  CHECK(workers.count(11) == 1);
  CHECK(workers.count(12) == 0);
  CHECK(by[4] == 12);
  CHECK(by[5] == 12);
}

TEST_CASE("a failure of any member ends the work and is rethrown") {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::atomic<int> done{0};
    const std::vector<int> owners(1000, threads - 1);
    const auto fail_at_fifth = [&](size_t item, Team&) {
      if (item == 5) throw std::runtime_error("the fifth");
      ++done;
    };
    CHECK_THROWS_WITH(helm::run_owned(pool, owners, helm::nodes_of(pool), fail_at_fifth),
                      "the fifth");
    CHECK(done < 1000);
  }
}

TEST_CASE("members that are not pinned have no node; pinned ones that of their CPU") {
  ThreadPool free(2);
  CHECK(helm::nodes_of(free) == std::vector<int>{0, 0});
  const std::vector<int> cpus = one_cpu_each(2);
  ThreadPool pinned(2, cpus);
  const std::vector<int> nodes = helm::nodes_of(pinned);
  REQUIRE(nodes.size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    const std::string link = "/sys/devices/system/cpu/cpu" + std::to_string(cpus[i]) + "/node" +
                             std::to_string(nodes[i]);
    const bool told = std::filesystem::exists("/sys/devices/system/node");
    CHECK((std::filesystem::exists(link) || (!told && nodes[i] == 0)));
  }
}
