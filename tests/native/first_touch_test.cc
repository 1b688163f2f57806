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
#include "cpu/stage.h"
#include "helm/engine.h"
#include "tiny_model.h"
#include "weights/store.h"

namespace {

using helm::Engine;
using helm::kAnyone;
using helm::LinearOp;
using helm::Plan;
using helm::Team;
using helm::TensorShare;
using helm::ThreadPool;
using helm::test::allowed_cpus;
using helm::test::one_cpu_each;
using helm::test::tiny_model;
using helm::test::TinyModel;
using helm::test::TinyShape;

// Matrices of many pieces per member, stacked ones of unequal heights.
TinyShape large(int threads, const char* dtype = "f32") {
  return {.vocab = 1021,
          .hidden = 512,
          .inter = 1024,
          .layers = 1,
          .heads = 8,
          .kv_heads = 2,
          .head_dim = 64,
          .weight_dtype = dtype,
          .threads = threads};
}

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
  helm::cpu::Bindings bindings{plan,
                               {},
                               {nullptr, plan.kv},
                               kernels,
                               helm::cpu::select_integer_kernels(),
                               {},
                               {},
                               {},
                               {},
                               {},
                               nullptr,
                               nullptr};
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
    const Plan plan = Plan::from_json(tiny_model(large(members)).plan);
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

TEST_CASE("a member's pieces have the same input as its last one where weights are of one dtype") {
  for (const bool mixed : {false, true}) {
    Plan plan = Plan::from_json(tiny_model(large(2)).plan);
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
  const Plan plan = Plan::from_json(tiny_model(large(3)).plan);
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

// --- loading -------------------------------------------------------------------------------------

namespace {

// Where each member's conversions went. The first five of each, as many as it has of its own at
// least, one per op, wait for all others', so that nobody helps before.
struct Conversions {
  static constexpr size_t kOwn = 5;

  std::map<std::thread::id, size_t> member;
  std::vector<std::vector<uintptr_t>> to;  // [members]
  std::atomic<size_t> begun{0};
};
Conversions* conversions = nullptr;

void narrow_recorded(const float* from, void* to, int64_t n) {
  helm::cpu::kernels_scalar()->narrow[static_cast<int>(helm::DType::kF16)](from, to, n);
  auto& own = conversions->to[conversions->member.at(std::this_thread::get_id())];
  own.push_back(reinterpret_cast<uintptr_t>(to));
  if (own.size() > Conversions::kOwn) return;
  ++conversions->begun;
  const size_t all = own.size() * conversions->to.size();
  while (conversions->begun.load() < all) std::this_thread::yield();
}

}  // namespace

TEST_CASE("each member loads the rows that it reads") {
  for (const int members : {1, 2, 5}) {
    const TinyModel model = tiny_model(large(members, "f16"));
    const Plan plan = Plan::from_json(model.plan);
    ThreadPool pool(members);
    std::vector<std::thread::id> ids(static_cast<size_t>(members));
    pool.run(
        [&](Team& team) { ids[static_cast<size_t>(team.worker())] = std::this_thread::get_id(); });
    Conversions seen;
    for (size_t i = 0; i < ids.size(); ++i) seen.member[ids[i]] = i;
    seen.to.resize(ids.size());
    helm::cpu::KernelTable kernels = *helm::cpu::kernels_scalar();
    kernels.narrow[static_cast<int>(helm::DType::kF16)] = narrow_recorded;
    conversions = &seen;
    const helm::Weights weights(plan, model.options(), kernels, pool, nullptr);
    conversions = nullptr;
    const auto shares =
        helm::decode_shares(plan, std::vector<bool>(plan.units.size(), true), members);
    std::map<uintptr_t, int> owner;  // by where a share begins
    for (size_t i = 0; i < shares.size(); ++i) {
      const auto base = static_cast<uintptr_t>(weights.on_cpu()[i].address);
      for (const TensorShare& share : shares[i]) {
        owner[base + static_cast<uintptr_t>(share.begin * plan.tensors[i].cols()) * 2] =
            share.member;
      }
    }
    for (int member = 0; member < members; ++member) {
      const std::vector<uintptr_t>& to = seen.to[static_cast<size_t>(member)];
      REQUIRE(to.size() >= Conversions::kOwn);
      for (size_t i = 0; i < Conversions::kOwn; ++i) CHECK(owner.at(to[i]) == member);
    }
  }
}

// --- the engine ----------------------------------------------------------------------------------

namespace {

std::set<pid_t> threads_of_process() {
  std::set<pid_t> ids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    ids.insert(std::stoi(entry.path().filename()));
  }
  return ids;
}

std::vector<float> logits_of(Engine& engine) {
  std::vector<float> last;
  const helm::SequenceId sequence = engine.open(20);
  engine.forward(sequence, helm::test::token_ids(20, 3), helm::StepInput::Outputs::kLast,
                 [&](std::span<const float> row) { last.assign(row.begin(), row.end()); });
  engine.close(sequence);
  return last;
}

}  // namespace

TEST_CASE("an engine asks for its threads' CPUs and leaves the caller's alone") {
  const std::vector<int> before = allowed_cpus();
  const std::vector<int> cpus = one_cpu_each(3);
  const TinyModel model = tiny_model(large(3, "f16"));
  helm::EngineOptions options = model.options();
  options.cpus = cpus;
  int reports = 0;
  options.progress = [&](int64_t, int64_t) {
    CHECK(allowed_cpus() == before);
    ++reports;
  };
  const std::set<pid_t> others = threads_of_process();
  Engine engine(Plan::from_json(model.plan), options);
  CHECK(reports > 0);
  CHECK(engine.stats().cpus == cpus);
  std::multiset<int> asked;
  for (const pid_t thread : threads_of_process()) {
    if (others.count(thread) > 0) continue;
    const std::vector<int> allowed = allowed_cpus(thread);
    REQUIRE(allowed.size() == 1);
    asked.insert(allowed[0]);
  }
  CHECK(asked == std::multiset<int>(cpus.begin() + 1, cpus.end()));
  CHECK(allowed_cpus() == before);
  CHECK(logits_of(engine).size() == 1021);
  CHECK(allowed_cpus() == before);
}

TEST_CASE("weights that members load for themselves are those of the model") {
  const TinyModel alone = tiny_model(large(1, "bf16"));
  Engine reference(Plan::from_json(alone.plan), alone.options());
  const std::vector<float> expected = logits_of(reference);
  for (const int threads : {2, 3, 7}) {
    const TinyModel model = tiny_model(large(threads, "bf16"));
    for (const bool pinned : {false, true}) {
      helm::EngineOptions options = model.options();
      if (pinned) options.cpus = one_cpu_each(threads);
      Engine engine(Plan::from_json(model.plan), options);
      CHECK(logits_of(engine) == expected);
    }
  }
}

TEST_CASE("CPUs that do not go with the threads are refused") {
  const TinyModel model = tiny_model(large(2));
  helm::EngineOptions options = model.options();
  options.cpus = {0};
  CHECK_THROWS_WITH(Engine(Plan::from_json(model.plan), options),
                    "[engine] 1 CPUs were named for 2 threads; name one for each thread, or none");
  options.cpus = {0, -3};
  CHECK_THROWS_WITH(Engine(Plan::from_json(model.plan), options),
                    "[engine] CPU -3 was named; expected 0 or more");
}
